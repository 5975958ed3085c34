"""Images of a request on their way to encode workers, while its prefill works on the text before them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

from epdserve.services.errors import InvalidRequest, ServiceError, Unavailable
from epdserve.services.image_types import EncodeImage, EncodeJob, PlacedImage
from epdserve.services.policy.encoding import EncodeLoad, choose_encoder
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.images.pictures import PromptImage
from epdserve.services.types import PrefillResult, WorkerInfo, WorkerRole, WorkerState

_AVOID_S: Final = 10.0  # a life that failed under a request
_REMEMBERED: Final = 65_536

_Life = tuple[str, str]


class ImageCalls:
    """Owned by the event loop.

    Args:
        encode_first: See ``ImageSettings``.
    """

    def __init__(self, cluster: Cluster, *, encode_first: bool = False) -> None:
        self._cluster, self._encode_first = cluster, encode_first
        self._avoid: dict[_Life, float] = {}  # until when
        self._sent: OrderedDict[tuple[bytes, _Life], None] = OrderedDict()

    def takes_images(self) -> bool:
        """Whether any worker embeds images now."""
        return any(info.encodes and info.state is WorkerState.READY for info in self._cluster.workers())

    def assign(self, images: Sequence[PromptImage], prefill: WorkerInfo) -> tuple[PlacedImage, ...]:
        """Where each image is embedded: in the encode pool, or, without one, beside its prefill.

        Raises:
            InvalidRequest: Nowhere; the message names the modality.
        """
        if not images:
            return ()
        pool = [
            info
            for info in self._cluster.workers()
            if info.role is WorkerRole.ENCODE and info.state is WorkerState.READY
        ]
        if not pool:
            if not prefill.encodes:
                raise InvalidRequest("no worker here takes images", param="messages")
            pool = [prefill]
        lives = {info.worker: info.incarnation for info in pool}
        fit = [info for info in pool if not self._is_avoided(info)]
        loads = [EncodeLoad(info.worker, info.queued_tokens) for info in fit or pool]
        placed = []
        for image in images:
            worker = choose_encoder(image.picture.digest, loads)
            placed.append(
                PlacedImage(image.first_token, image.tokens, image.picture.digest, worker, lives[worker])
            )
        return tuple(placed)

    async def beside(
        self,
        prefill: Coroutine[Any, Any, PrefillResult],
        request_id: str,
        images: Sequence[PromptImage],
        placed: Sequence[PlacedImage],
        *,
        timeout_s: float,
        trace: str = "",
    ) -> PrefillResult:
        """A prefill, and the embedding of its images at the same time.

        A prefill that hits beyond an image does not wait for it; an image that fails ends the prefill.

        Args:
            trace: W3C traceparent, empty if none.

        Raises:
            ServiceError: What failed first, that of the images before that of the prefill.
        """
        encoding = asyncio.create_task(
            self._encode(request_id, images, placed, timeout_s=timeout_s, trace=trace), name="encode-images"
        )

        async def run() -> PrefillResult:
            if self._encode_first:
                await asyncio.wait({encoding})
                encoding.result()
            return await prefill

        running = asyncio.create_task(run(), name="prefill-beside-images")
        try:
            await asyncio.wait({encoding, running}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                encoding.result()  # done: raises what went wrong with an image
                await asyncio.wait({running})
            elif running.exception() is not None and not encoding.done():
                # Both fail where an encode worker dies; what it says itself tells more
                await asyncio.wait({encoding}, timeout=0.1)
            if running.exception() is not None and encoding.done():
                encoding.result()
            return running.result()
        except ServiceError as error:
            self._note(error, placed)
            raise
        finally:
            for task in (encoding, running):
                task.cancel()
            await asyncio.wait({encoding, running})
            prefill.close()  # of an image that failed first it was never begun

    async def _encode(
        self,
        request_id: str,
        images: Sequence[PromptImage],
        placed: Sequence[PlacedImage],
        *,
        timeout_s: float,
        trace: str,
    ) -> None:
        by_life: dict[_Life, list[EncodeImage]] = {}
        for image, place in zip(images, placed, strict=True):
            picture = image.picture
            by_life.setdefault((place.encoder, place.incarnation), []).append(
                EncodeImage(picture.digest, picture.tokens, picture.data)
            )
        calls = [
            asyncio.create_task(
                self._ask(life, EncodeJob(request_id, tuple(some), trace), timeout_s=timeout_s)
            )
            for life, some in by_life.items()
        ]
        try:
            for call in asyncio.as_completed(calls):
                await call
        finally:
            for task in calls:
                task.cancel()
            await asyncio.wait(calls)

    async def _ask(self, life: _Life, job: EncodeJob, *, timeout_s: float) -> None:
        """Bytes go only where the image is not known to be."""
        worker, _ = life
        asked = tuple(
            EncodeImage(image.digest, image.tokens) if (image.digest, life) in self._sent else image
            for image in job.images
        )
        result = await self._cluster.encode(worker, replace(job, images=asked), timeout_s=timeout_s)
        if missing := set(result.missing):
            again = tuple(image for image in job.images if image.digest in missing)
            await self._cluster.encode(worker, replace(job, images=again), timeout_s=timeout_s)
        for image in job.images:
            self._sent[image.digest, life] = None
            self._sent.move_to_end((image.digest, life))
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)

    def _note(self, error: ServiceError, placed: Sequence[PlacedImage]) -> None:
        """Leave a life alone for a while that failed under a request."""
        if not isinstance(error, Unavailable):
            return
        now = asyncio.get_running_loop().time()
        self._avoid = {life: until for life, until in self._avoid.items() if until > now}
        for place in placed:
            if place.encoder == error.worker:
                self._avoid[place.encoder, place.incarnation] = now + _AVOID_S

    def _is_avoided(self, info: WorkerInfo) -> bool:
        until = self._avoid.get((info.worker, info.incarnation))
        return until is not None and until > asyncio.get_running_loop().time()
