"""Images to embeddings on one worker: looked up, decoded, batched by patches, stored, lent.

The event loop keeps the books; pixels are decoded in threads of their own, and one thread runs the tower. Images that
wait are put into one batch up to a number of patches, whatever their sizes; the same image asked for twice is made
once. What goes wrong with an image is told to whoever asked for it and leaves nothing in the cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Final

import torch
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.lease import LeaseTable
from epdserve.model.errors import ImageError, ImageTooLarge
from epdserve.model.vision.encoder import PatchedImage, VisionEncoder
from epdserve.model.vision.pixels import read_pixels
from epdserve.services.engine.embedding_store import EmbeddingStore, Held
from epdserve.services.engine.image_config import ImageEncoderSettings
from epdserve.services.engine.image_metrics import EmbeddingMetrics
from epdserve.services.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ServiceError,
    Unavailable,
)
from epdserve.services.image_types import (
    EmbeddingWish,
    EncodeImage,
    EncodeJob,
    EncodeResult,
    LentEmbeddings,
)
from epdserve.services.observability.tracing import UNTRACED, Attributes, Tracing

log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _Pending:
    """An image with its pixels, on its way through the tower."""

    digest: bytes
    image: PatchedImage
    done: asyncio.Future[None]
    queued_at: float


class ImageEncoding:
    """Owned by one event loop; ``start`` first, ``stop`` last, once each.

    Args:
        leases: Of whoever reads the store's memory.
        worker: Named in errors.
        incarnation: This life of the worker.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        store: EmbeddingStore,
        settings: ImageEncoderSettings,
        leases: LeaseTable,
        *,
        worker: str,
        incarnation: str,
        clock: Clock,
        metrics: EmbeddingMetrics,
        tracing: Tracing = UNTRACED,
    ) -> None:
        self._encoder, self._store, self._settings, self._leases = encoder, store, settings, leases
        self._worker, self._incarnation = worker, incarnation
        self._clock, self._metrics, self._tracing = clock, metrics, tracing
        self._making: dict[bytes, asyncio.Task[None]] = {}
        self._queue: deque[_Pending] = deque()
        self._queued_bytes = 0
        self._work, self._arrived = asyncio.Event(), asyncio.Event()
        self._decoders = ThreadPoolExecutor(settings.decode_threads, "pixels")
        self._tower = ThreadPoolExecutor(1, "tower")
        self._batcher: asyncio.Task[None] | None = None
        self.batch_began_at: float | None = None

    @property
    def queued_patches(self) -> int:
        """Patches that wait for the tower."""
        return sum(pending.image.shape.patches for pending in self._queue)

    @property
    def making(self) -> int:
        """Images being made."""
        return len(self._making)

    @property
    def step_age_s(self) -> float:
        """Age of the running batch, 0 between batches."""
        return 0.0 if self.batch_began_at is None else self._clock.monotonic() - self.batch_began_at

    def start(self) -> None:
        """Begin to take work."""
        self._batcher = asyncio.create_task(self._run_batches(), name="image-batches")

    async def stop(self) -> None:
        """End everything; whoever waits gets an error."""
        tasks = [*self._making.values(), *((self._batcher,) if self._batcher is not None else ())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        self._decoders.shutdown(wait=False, cancel_futures=True)
        self._tower.shutdown(wait=False, cancel_futures=True)

    # -- calls ----------------------------------------------------------------------------------------------

    async def run(self, job: EncodeJob) -> EncodeResult:
        """Have all images of a job ready, but for those that were only looked up.

        Raises:
            InvalidRequest: An image is damaged, of a kind that is not taken, or has another span than was said.
            PayloadTooLarge: One exceeds a limit.
            Overloaded: Too many bytes wait, or everything in the cache is in use.
        """
        began, outcome, hits = perf_counter(), "failed", 0
        try:
            result = await self._run(job)
            outcome, hits = "ok", result.hits
            return result
        finally:
            told: Attributes = {
                "epdserve.request_id": job.request_id,
                "epdserve.outcome": outcome,
                "epdserve.images": len(job.images),
                "epdserve.hits": hits,
            }
            self._tracing.record(
                "encode", parent=job.trace, began=began, ended=perf_counter(), attributes=told
            )

    async def _run(self, job: EncodeJob) -> EncodeResult:
        hits = 0
        missing: list[bytes] = []
        waits: list[asyncio.Task[None]] = []
        for image in job.images:
            match self._ask(image):
                case None:
                    missing.append(image.digest)
                case True:
                    hits += 1
                case asyncio.Task() as task:
                    waits.append(task)
        for task in waits:  # all are under way; the first that failed is told
            await self._await_made(task)
        return EncodeResult(hits, tuple(missing))

    async def lend(self, wish: EmbeddingWish, *, deadline_s: float) -> LentEmbeddings:
        """Lend an image's embeddings, once they are there.

        Raises:
            InvalidRequest: The span has another length here.
            Unavailable: This encoder belongs to another model.
            DeadlineExceeded: Nobody has brought the image in time.
        """
        held = await self.wait_for(wish, deadline_s=deadline_s)
        lease = self._leases.grant(self._settings.lease_ttl_s, partial(self._store.unpin, held))
        return LentEmbeddings(
            lease,
            self._incarnation,
            tuple(slot.index for slot in held.slots),
            sum(self._store.used_bytes(index, held.tokens) for index in range(len(held.slots))),
            held.checksums,
        )

    async def wait_for(self, wish: EmbeddingWish, *, deadline_s: float) -> Held:
        """The same for a reader in this process: pinned, and for the caller to unpin. Raises as ``lend``."""
        if wish.fingerprint != self._encoder.fingerprint:
            raise Unavailable("this encoder belongs to another model", worker=self._worker)
        try:
            async with asyncio.timeout(deadline_s):
                while (held := self._store.pin(wish.digest, wish.tokens)) is None:
                    if self._store.touch(wish.digest):
                        raise InvalidRequest(
                            f"the image does not take {wish.tokens} tokens", param="messages"
                        )
                    await self._arrived.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no embeddings within {deadline_s} s", worker=self._worker) from None
        return held

    # -- within ---------------------------------------------------------------------------------------------

    def _ask(self, image: EncodeImage) -> asyncio.Task[None] | bool | None:
        """True if an image is here, the task that makes it, or None if it is only looked up and not here."""
        lookups = self._metrics.lookups
        if self._store.touch(image.digest):
            lookups.labels(outcome="hit").inc()
            return True
        if (task := self._making.get(image.digest)) is not None:
            lookups.labels(outcome="joined").inc()
            return task
        if not image.data:
            lookups.labels(outcome="absent").inc()
            return None
        lookups.labels(outcome="miss").inc()
        if self._queued_bytes + len(image.data) > self._settings.max_queued_bytes:
            raise Overloaded(
                f"{self._queued_bytes} bytes of images wait", worker=self._worker, retry_after_s=_RETRY_S
            )
        self._queued_bytes += len(image.data)
        task = asyncio.create_task(self._make(image), name="make-image")
        self._making[image.digest] = task
        task.add_done_callback(partial(self._made, image))
        return task

    def _made(self, image: EncodeImage, task: asyncio.Task[None]) -> None:
        self._queued_bytes -= len(image.data)
        del self._making[image.digest]
        if not task.cancelled() and (error := task.exception()) is not None:
            code = error.code if isinstance(error, ServiceError) else "internal"
            self._metrics.failures.labels(reason=code).inc()

    async def _await_made(self, task: asyncio.Task[None]) -> None:
        """Wait for a task that others may wait for, too: a caller that goes away does not end it."""
        await asyncio.wait([task])
        if task.cancelled():
            raise Unavailable("the worker is stopping", worker=self._worker)
        task.result()

    async def _make(self, image: EncodeImage) -> None:
        loop, began = asyncio.get_running_loop(), self._clock.monotonic()
        patched = await loop.run_in_executor(self._decoders, self._read, image)
        now = self._clock.monotonic()
        self._metrics.stage_seconds.labels(stage="pixels").observe(now - began)
        pending = _Pending(image.digest, patched, loop.create_future(), now)
        self._queue.append(pending)
        self._work.set()
        await pending.done

    def _read(self, image: EncodeImage) -> PatchedImage:
        """In a thread."""
        try:
            shape, pixels = read_pixels(image.data, self._encoder.config, self._settings.limits())
        except ImageTooLarge as error:
            raise PayloadTooLarge(str(error), param="messages") from None
        except ImageError as error:
            raise InvalidRequest(str(error), param="messages") from None
        if shape.tokens != image.tokens:
            raise InvalidRequest(
                f"the image takes {shape.tokens} tokens, {image.tokens} were counted", param="messages"
            )
        return PatchedImage(shape, pixels)

    async def _run_batches(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            batch = self._take_batch()
            self.batch_began_at = self._clock.monotonic()
            try:
                refused = await loop.run_in_executor(self._tower, self._run_batch, batch)
            except Exception as error:
                # An edge: whatever the tower raises must reach those who wait, and the next batch must run.
                for pending in batch:
                    if not pending.done.done():
                        pending.done.set_exception(Internal(f"{type(error).__name__} in the vision encoder"))
                log.exception("vision encoder failed", extra={"images": len(batch)})
                continue
            finally:
                self.batch_began_at = None
            self._settle(batch, refused)

    def _take_batch(self) -> list[_Pending]:
        """Waiting images in order, up to the budget of patches; at least one."""
        batch = [self._queue.popleft()]
        room = self._settings.batch_patches - batch[0].image.shape.patches
        while self._queue and self._queue[0].image.shape.patches <= room:
            batch.append(self._queue.popleft())
            room -= batch[-1].image.shape.patches
        if not self._queue:
            self._work.clear()
        return batch

    def _run_batch(self, batch: list[_Pending]) -> set[bytes]:
        """In the tower's thread; digests of the images that found no room."""
        began = self._clock.monotonic()
        embedded: list[torch.Tensor] = self._encoder.encode([pending.image for pending in batch])
        refused = {
            pending.digest
            for pending, rows_ND in zip(batch, embedded, strict=True)
            if not self._store.put(pending.digest, rows_ND)
        }
        metrics = self._metrics
        metrics.stage_seconds.labels(stage="tower").observe(self._clock.monotonic() - began)
        metrics.patches.inc(sum(pending.image.shape.patches for pending in batch))
        metrics.batch_images.observe(len(batch))
        for pending in batch:
            metrics.stage_seconds.labels(stage="queue").observe(began - pending.queued_at)
        return refused

    def _settle(self, batch: list[_Pending], refused: set[bytes]) -> None:
        for pending in batch:
            if pending.done.done():
                continue
            if pending.digest in refused:
                pending.done.set_exception(
                    Overloaded("all embeddings here are in use", worker=self._worker, retry_after_s=_RETRY_S)
                )
            else:
                pending.done.set_result(None)
        self._arrived.set()
        self._arrived.clear()
