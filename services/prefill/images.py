"""Images of prompts, between the step loop and whoever has their embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Final, Protocol

import torch
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.staging import PAGE_BYTES, StagingPool
from epdserve.kvstore.types import LeaseId, MemoryRegion
from epdserve.model.config import ModelConfig
from epdserve.model.errors import ModelError
from epdserve.model.vision.tensors import load_vision_tensors
from epdserve.services.engine.image_config import ImageMode
from epdserve.services.engine.image_encoding import ImageEncoding
from epdserve.services.engine.image_fetch import ImageFetcher, LocalSource, RemoteSource
from epdserve.services.engine.image_metrics import ImageFetchMetrics
from epdserve.services.engine.image_peers import EncodePeers
from epdserve.services.engine.requests import RequestImage
from epdserve.services.engine.seat import Seat
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.engine.vision_parts import VisionParts
from epdserve.services.errors import Overloaded, ServiceError, Unavailable
from epdserve.services.image_types import (
    EMBEDDINGS,
    SPAN_ROWS,
    EmbeddingWish,
    EncodeJob,
    EncodeResult,
    LentEmbeddings,
)
from epdserve.services.observability.tracing import Tracing
from epdserve.services.prefill.config import PrefillSettings
from epdserve.services.prefill.task import PrefillTask
from epdserve.services.types import WorkerDescription, WorkerInfo
from prometheus_client import CollectorRegistry

_AGAIN_S: Final = 0.05  # when the step loop's queue is full


class ImageTaker(Protocol):
    """The worker, in the step loop."""

    def arrived(self, task: PrefillTask, image: RequestImage, embeddings_ND: torch.Tensor) -> None:
        """Let the rows of an image run."""

    def image_failed(self, task: PrefillTask, error: ServiceError) -> None:
        """End a prompt one of whose images cannot be had."""


class ImageDelivery:
    """Between the step loop, which wants images and takes them, and the fetcher on the event loop."""

    def __init__(self, fetcher: ImageFetcher, steps: StepLoop, taker: ImageTaker) -> None:
        self._fetcher, self._steps, self._taker = fetcher, steps, taker

    def want(self, task: PrefillTask) -> None:
        """Fetch the images that rows of a prompt belong to which are yet to be run."""
        for image in task.request.blind_images:
            self._want(task, image)

    def forget(self, task: PrefillTask) -> None:
        """Fetch no more for a prompt that has ended."""
        self._fetcher.cancel(task)

    def _want(self, task: PrefillTask, image: RequestImage) -> None:
        self._fetcher.start(
            task,
            image.place,
            lambda embeddings_ND: self._hand_in(lambda: self._taker.arrived(task, image, embeddings_ND)),
            lambda error: self._hand_in(lambda: self._taker.image_failed(task, error)),
        )

    def _hand_in(self, then: Callable[[], None]) -> None:
        """On the event loop."""
        try:
            self._steps.submit(then)
        except Overloaded:
            asyncio.get_running_loop().call_later(_AGAIN_S, self._hand_in, then)
        except Unavailable:
            return  # the loop has ended, and with it every prompt


class ImageMemory:
    """What a prefill worker with images has before it has anything else.

    Attributes:
        parts: The vision encoder of this process, in mode LOCAL.
        pool: Where embeddings lie: pulled ones, or those made here.
    """

    def __init__(
        self, role: PrefillSettings, config: ModelConfig, clock: Clock, registry: CollectorRegistry
    ) -> None:
        """Load what the mode asks for.

        Raises:
            Unavailable: The vision part of the model cannot be read, or the memory cannot be had.
        """
        model_dir, use = role.engine.model_dir, role.images
        self.use, self.hidden = use, config.text.hidden_size
        self.parts: VisionParts | None = None
        if use.mode is ImageMode.LOCAL:
            self.parts = VisionParts.load(model_dir, use.encoder, clock, registry, device=role.engine.device)
            self.fingerprint, self.pool = self.parts.encoder.fingerprint, self.parts.store.pool
        else:
            try:
                self.fingerprint = load_vision_tensors(model_dir, config)[1]
                self.pool = _staging(self.hidden, use.staging_bytes)
            except (ModelError, OSError, ValueError) as error:
                raise Unavailable(f"images: {error}") from error

    @property
    def region(self) -> MemoryRegion:
        """For transfers."""
        return self.pool.region


class ImageDesk:
    """Wants of prompts, and in mode LOCAL the Encode service. Owned by the event loop; ``want`` and ``forget`` are the
    step loop's.

    Args:
        find: A worker as the registry has it now.
        describe: This worker.
    """

    def __init__(
        self,
        memory: ImageMemory,
        transfers: TransferThread,
        steps: StepLoop,
        leases: LeaseTable,
        find: Callable[[str], WorkerInfo | None],
        describe: Callable[[], WorkerDescription],
        *,
        seat: Seat,
        clock: Clock,
        registry: CollectorRegistry,
        tracing: Tracing,
    ) -> None:
        self._memory, self._transfers, self._steps, self._leases = memory, transfers, steps, leases
        self._describe, self._seat = describe, seat
        self.encoding: ImageEncoding | None = None
        self._delivery: ImageDelivery | None = None
        self._peers = EncodePeers(find, token=seat.cluster_token)
        self._metrics = ImageFetchMetrics(registry)
        local, remote, parts = None, None, memory.parts
        if parts is not None:
            self.encoding = ImageEncoding(
                parts.encoder,
                parts.store,
                memory.use.encoder,
                leases,
                worker=seat.worker,
                incarnation=seat.incarnation,
                clock=clock,
                metrics=parts.metrics,
                tracing=tracing,
            )
            local = LocalSource(seat.worker, self.encoding, parts.store)
        else:
            remote = RemoteSource(
                self._peers, transfers, memory.pool, hidden=memory.hidden, most=memory.use.max_fetches
            )
        self._fetcher = ImageFetcher(
            local,
            remote,
            fingerprint=memory.fingerprint,
            use=memory.use,
            clock=clock,
            metrics=self._metrics,
        )

    def start(self, taker: ImageTaker, exits: AsyncExitStack) -> None:
        """Begin; ``exits`` ends it."""
        self._delivery = ImageDelivery(self._fetcher, self._steps, taker)
        exits.push_async_callback(self._peers.close)
        if self.encoding is not None and self._memory.parts is not None:
            parts, encoding = self._memory.parts, self.encoding
            encoding.start()
            exits.push_async_callback(encoding.stop)
            parts.metrics.watch(
                held_bytes=parts.store.held_bytes,
                pinned=parts.store.pinned,
                queued_patches=lambda: encoding.queued_patches,
            )
        exits.push_async_callback(self._fetcher.stop)

    # -- the step loop's side -------------------------------------------------------------------------------

    def want(self, task: PrefillTask) -> None:
        """Fetch the images that rows of a prompt which has its place belong to."""
        assert self._delivery is not None
        needed = len(task.request.blind_images)
        self._metrics.fetches.labels(outcome="cached").inc(len(task.request.images) - needed)
        self._delivery.want(task)

    def forget(self, task: PrefillTask) -> None:
        """Fetch no more for a prompt that has ended."""
        assert self._delivery is not None
        self._delivery.forget(task)

    # -- the Encode service ---------------------------------------------------------------------------------

    async def describe(self) -> WorkerDescription:
        """Facts and the door to the embeddings."""
        return self._describe()

    async def encode(self, job: EncodeJob) -> EncodeResult:
        """See ``ImageEncoding.run``."""
        assert self.encoding is not None
        return await self.encoding.run(job)

    async def lend(self, wish: EmbeddingWish, *, deadline_s: float) -> LentEmbeddings:
        """See ``ImageEncoding.lend``."""
        assert self.encoding is not None
        lent = await self.encoding.lend(wish, deadline_s=deadline_s)
        self._transfers.wake()
        return lent

    async def end_loan(self, lease: str, *, incarnation: str) -> bool:
        """End a lease; one of another incarnation never holds."""
        return incarnation == self._seat.incarnation and self._leases.end(LeaseId(lease))


def _staging(hidden: int, nbytes: int) -> StagingPool:
    slot_bytes = -(-SPAN_ROWS * hidden * 2 // PAGE_BYTES) * PAGE_BYTES
    return StagingPool(EMBEDDINGS, slot_bytes=slot_bytes, count=max(1, nbytes // slot_bytes))
