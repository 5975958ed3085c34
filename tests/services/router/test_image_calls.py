"""Images on their way to encode workers, beside a prefill: retries, and what is sent."""

import asyncio
from collections.abc import Sequence

import pytest
from epdserve.services.errors import InvalidRequest, ServiceError, WorkerLost
from epdserve.services.image_types import EncodeJob, EncodeResult, PlacedImage
from epdserve.services.router.image_calls import ImageCalls
from epdserve.services.router.images.pictures import Picture, PromptImage
from epdserve.services.types import WorkerInfo, WorkerRole, WorkerState
from support.fake_cluster import FakeCluster, worker_info

IMAGE = PromptImage(3, Picture(b"d" * 32, 5, b"bytes"))
OTHER = PromptImage(9, Picture(b"e" * 32, 4, b"more bytes"))


class Cluster(FakeCluster):
    """Keeps digests as a worker does, and fails as it is told."""

    def __init__(self, infos: Sequence[WorkerInfo]) -> None:
        super().__init__(infos=infos)
        self.asked: list[tuple[str, list[bytes]]] = []
        self.kept: set[bytes] = set()
        self.errors: list[ServiceError] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def encode(self, worker: str, job: EncodeJob, *, timeout_s: float) -> EncodeResult:
        self.asked.append((worker, [image.data for image in job.images]))
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        missing = tuple(i.digest for i in job.images if not i.data and i.digest not in self.kept)
        self.kept |= {image.digest for image in job.images if image.data}
        return EncodeResult(0, missing)


def encoder(name: str, **changes: object) -> WorkerInfo:
    return worker_info(name, WorkerRole.ENCODE, encodes=True, **changes)


def prefill(*, encodes: bool = False) -> WorkerInfo:
    return worker_info("p0", WorkerRole.PREFILL, encodes=encodes)


async def result(value: str = "done", delay_s: float = 0.0) -> str:
    await asyncio.sleep(delay_s)
    return value


async def beside(calls: ImageCalls, work, placed: tuple[PlacedImage, ...], images=(IMAGE,)) -> str:
    return await calls.beside(work, "r", images, placed, timeout_s=5.0)


async def test_images_go_to_the_encode_pool_and_without_one_beside_the_prefill() -> None:
    calls = ImageCalls(Cluster([prefill(encodes=True), encoder("e0")]))
    assert [p.encoder for p in calls.assign([IMAGE, OTHER], prefill(encodes=True))] == ["e0", "e0"]
    calls = ImageCalls(Cluster([prefill(encodes=True), encoder("e0", state=WorkerState.DRAINING)]))
    assert [p.encoder for p in calls.assign([IMAGE], prefill(encodes=True))] == ["p0"]
    assert calls.takes_images()


async def test_without_anybody_the_modality_is_named() -> None:
    calls = ImageCalls(Cluster([prefill()]))
    assert not calls.takes_images()
    assert calls.assign([], prefill()) == ()
    with pytest.raises(InvalidRequest, match="images"):
        calls.assign([IMAGE], prefill())


async def test_bytes_are_sent_once_and_again_where_they_were_forgotten() -> None:
    cluster = Cluster([encoder("e0")])
    calls = ImageCalls(cluster)
    placed = calls.assign([IMAGE], prefill())
    for _ in range(2):
        assert await beside(calls, result(delay_s=0.01), placed) == "done"
    cluster.kept.clear()
    await beside(calls, result(delay_s=0.01), placed)
    assert [data for _, data in cluster.asked] == [[b"bytes"], [b""], [b""], [b"bytes"]]


async def test_a_prefill_that_needs_no_image_does_not_wait_for_one() -> None:
    cluster = Cluster([encoder("e0")])
    cluster.gate.clear()
    calls = ImageCalls(cluster)
    async with asyncio.timeout(2):
        assert await beside(calls, result(), calls.assign([IMAGE], prefill())) == "done"


async def test_an_image_that_fails_ends_the_prefill() -> None:
    cluster = Cluster([encoder("e0")])
    cluster.errors.append(InvalidRequest("no image"))
    calls = ImageCalls(cluster)
    with pytest.raises(InvalidRequest, match="no image"):
        await beside(calls, result(delay_s=30), calls.assign([IMAGE], prefill()))


async def test_a_prefill_may_wait_until_its_images_are_embedded() -> None:
    cluster, order = Cluster([encoder("e0")]), []
    cluster.gate.clear()

    async def work() -> str:
        order.append("prefill")
        return "done"

    calls = ImageCalls(cluster, encode_first=True)
    running = asyncio.create_task(beside(calls, work(), calls.assign([IMAGE], prefill())))
    await asyncio.sleep(0.01)
    order.append("embedded")
    cluster.gate.set()
    assert await running == "done"
    assert order == ["embedded", "prefill"]
    cluster.errors.append(InvalidRequest("no image"))
    with pytest.raises(InvalidRequest, match="no image"):
        await beside(calls, work(), calls.assign([OTHER], prefill()), (OTHER,))
    assert order == ["embedded", "prefill"]


async def test_a_dead_encode_worker_is_avoided_the_next_time() -> None:
    cluster = Cluster([encoder("e0"), encoder("e1")])
    calls = ImageCalls(cluster)
    placed = calls.assign([IMAGE], prefill())
    dead = placed[0].encoder

    async def fails() -> str:
        await asyncio.sleep(0)
        raise WorkerLost("gone", worker=dead)

    cluster.errors.append(WorkerLost("gone", worker=dead))
    with pytest.raises(WorkerLost):
        await beside(calls, fails(), placed)
    assert calls.assign([IMAGE], prefill())[0].encoder != dead
    cluster.infos = [encoder(dead)]  # nobody else is left: better than nothing
    assert calls.assign([IMAGE], prefill())[0].encoder == dead


async def test_whoever_leaves_takes_both_calls_with_him() -> None:
    cluster = Cluster([encoder("e0")])
    cluster.gate.clear()
    calls = ImageCalls(cluster)
    running = asyncio.create_task(beside(calls, result(delay_s=30), calls.assign([IMAGE], prefill())))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    left = {task.get_name() for task in asyncio.all_tasks()}
    assert not left & {"encode-images", "prefill-beside-images"}
