"""Images of many requests through one tower: what is put together, made once, bounded, and told when it fails."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import torch
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.lease import LeaseTable
from epdserve.model.vision.encoder import PatchedImage
from epdserve.model.vision.pixels import ImageLimits, measure_image
from epdserve.model.vision.tensors import vision_of
from epdserve.services.engine.embedding_store import EmbeddingStore
from epdserve.services.engine.image_config import ImageEncoderSettings
from epdserve.services.engine.image_encoding import ImageEncoding
from epdserve.services.engine.image_metrics import EmbeddingMetrics
from epdserve.services.errors import Internal, Overloaded
from epdserve.services.image_types import SPAN_ROWS, EmbeddingWish, EncodeImage, EncodeJob
from prometheus_client import CollectorRegistry
from support.vision import Shown, encoded, picture, small_config, small_encoder

SIZES = [(20, 20), (60, 24), (24, 60), (30, 40), (90, 9), (44, 44)]
SMALL_VISION = vision_of(small_config())
IMAGES = [Shown.of(encoded(picture(*size, seed=seed))) for seed, size in enumerate(SIZES)]
PATCHES = [measure_image(image.data, SMALL_VISION, ImageLimits()).patches for image in IMAGES]
SMALLEST = IMAGES[0]
WITHIN_S = 10.0


class Tower:
    """The small encoder; remembers its batches, waits for its gate, and fails when told to."""

    def __init__(self) -> None:
        self._inner = small_encoder()
        self.config, self.fingerprint = self._inner.config, self._inner.fingerprint
        self.hidden_size = self._inner.hidden_size
        self.batches: list[list[int]] = []  # patches of each image
        self.gate, self.fails = threading.Event(), False
        self.gate.set()

    def encode(self, images: Sequence[PatchedImage]) -> list[torch.Tensor]:
        self.batches.append([image.shape.patches for image in images])
        assert self.gate.wait(WITHIN_S)
        if self.fails:
            raise RuntimeError("broken arithmetic")
        return self._inner.encode(images)


class Bench:
    """A worker's encoding with its store, without a worker."""

    def __init__(self, *, slots: int = 64, **settings: object) -> None:
        self.tower, self.registry = Tower(), CollectorRegistry()
        metrics = EmbeddingMetrics(self.registry)
        used = ImageEncoderSettings.model_validate(settings)
        self.store = EmbeddingStore(
            hidden=self.tower.hidden_size,
            nbytes=slots * SPAN_ROWS * self.tower.hidden_size * 2 + 4096 * slots,
            max_tokens=SPAN_ROWS,
            keep_s=used.keep_s,
            clock=SystemClock(),
            metrics=metrics,
        )
        self.encoding = ImageEncoding(
            self.tower,  # type: ignore[arg-type]
            self.store,
            used,
            LeaseTable(),
            worker="encode-0",
            incarnation="1",
            clock=SystemClock(),
            metrics=metrics,
        )
        metrics.watch(
            held_bytes=self.store.held_bytes,
            pinned=self.store.pinned,
            queued_patches=lambda: self.encoding.queued_patches,
        )

    def ask(self, *images: Shown) -> asyncio.Task[object]:
        wanted = tuple(EncodeImage(image.digest, image.tokens, image.data) for image in images)
        return asyncio.create_task(self.encoding.run(EncodeJob("r", wanted)))

    async def until_batches(self, count: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while len(self.tower.batches) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def until_queued(self, patches: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while self.encoding.queued_patches < patches:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def sample(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def bench(**settings: object) -> AsyncIterator[Bench]:
    made = Bench(**settings)  # type: ignore[arg-type]
    made.encoding.start()
    try:
        yield made
    finally:
        made.tower.gate.set()
        await made.encoding.stop()
        made.store.check()


async def test_images_that_wait_are_put_together_up_to_a_number_of_patches_whatever_their_sizes() -> None:
    most = 250
    async with bench(batch_patches=most) as made:
        made.tower.gate.clear()
        asked = [made.ask(SMALLEST)]
        await made.until_batches(1)
        asked += [made.ask(*IMAGES[1:3]), made.ask(*IMAGES[3:])]
        await made.until_queued(sum(PATCHES[1:]))
        made.tower.gate.set()
        await asyncio.gather(*asked)
        batches = made.tower.batches
        assert [patches for batch in batches for patches in batch] == PATCHES
        assert max(map(len, batches)) > 1
        assert all(sum(batch) <= most or len(batch) == 1 for batch in batches)
        for batch, following in itertools.pairwise(batches[1:]):
            assert sum(batch) + following[0] > most  # nothing that fitted was left behind
        assert made.sample("epdserve_encode_patches_total") == sum(map(sum, batches))
        assert made.sample("epdserve_encode_batch_images_count") == len(batches)
        assert made.sample("epdserve_embedding_cache_bytes") == made.store.held_bytes() > 0
        for image in IMAGES:
            held = made.store.pin(image.digest, image.tokens)
            assert held is not None
            assert torch.equal(made.store.read(held), image.embeddings_ND)
            made.store.unpin(held)


async def test_an_image_that_two_ask_for_at_once_is_made_once_even_if_the_first_goes_away() -> None:
    async with bench() as made:
        made.tower.gate.clear()
        first = made.ask(SMALLEST)
        await made.until_batches(1)
        second = made.ask(SMALLEST)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        made.tower.gate.set()
        await second
        assert (await made.ask(SMALLEST)).hits == 1  # type: ignore[attr-defined]
        assert len(made.tower.batches) == 1
        outcomes = [
            made.sample("epdserve_embedding_lookups_total", outcome=o) for o in ("miss", "joined", "hit")
        ]
        assert outcomes == [1, 1, 1]


async def test_a_tower_that_fails_is_told_to_whoever_waits_and_the_next_batch_runs() -> None:
    async with bench() as made:
        made.tower.fails = True
        with pytest.raises(Internal, match="vision encoder"):
            await made.ask(SMALLEST)
        assert made.store.held_bytes() == 0
        assert made.sample("epdserve_encode_failures_total", reason="internal") == 1
        made.tower.fails = False
        await made.ask(SMALLEST)
        assert made.store.held_bytes() > 0


async def test_bytes_that_wait_are_bounded() -> None:
    async with bench(max_queued_bytes=len(SMALLEST.data)) as made:
        made.tower.gate.clear()
        first = made.ask(SMALLEST)
        await made.until_batches(1)
        with pytest.raises(Overloaded, match="bytes of images wait") as refused:
            await made.ask(IMAGES[1])
        assert refused.value.retry_after_s
        made.tower.gate.set()
        await first
        assert made.encoding.making == 0


async def test_where_everything_is_in_use_an_image_is_refused_and_not_kept_in_part() -> None:
    async with bench(slots=1, keep_s=30.0) as made:
        await made.ask(SMALLEST)
        with pytest.raises(Overloaded, match="in use"):
            await made.ask(IMAGES[1])
        assert made.sample("epdserve_embedding_refusals_total") == 1
        wish = EmbeddingWish(SMALLEST.digest, SMALLEST.tokens, made.tower.fingerprint)
        made.store.unpin(await made.encoding.wait_for(wish, deadline_s=1.0))  # fetched: it may go now
        await made.ask(IMAGES[1])
        assert made.sample("epdserve_embedding_evictions_total") == 1
        assert not made.store.touch(SMALLEST.digest)
