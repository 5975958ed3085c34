"""Images in the process that does everything: the vision encoder and its cache, without a worker around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Self

from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.lease import LeaseTable
from epdserve.model.config import ModelConfig
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.image_config import ImageEncoderSettings, PrefillImages
from epdserve.services.engine.image_encoding import ImageEncoding
from epdserve.services.engine.image_fetch import ImageFetcher, LocalSource
from epdserve.services.engine.image_metrics import ImageFetchMetrics
from epdserve.services.engine.loop_thread import LoopThread
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.engine.vision_parts import VisionParts
from epdserve.services.errors import ServiceError
from epdserve.services.image_types import EncodeImage, EncodeJob, PlacedImage
from epdserve.services.prefill.images import ImageDelivery
from epdserve.services.prefill.task import PrefillTask
from epdserve.services.prefill.worker import PrefillWorker
from epdserve.services.router.images.pictures import PromptImage
from prometheus_client import CollectorRegistry

_START_S: Final = 10.0


class LocalImages:
    """Embeds images on the event loop of ``events`` and its threads, as a prefill worker with an encoder does.

    ``bind`` comes before the first prompt. ``encode`` may be called from any thread; ``want`` and ``forget`` are the
    step loop's.
    """

    def __init__(self, events: LoopThread, parts: VisionParts, *, worker: str, incarnation: str) -> None:
        self._events, self._worker, self._incarnation = events, worker, incarnation
        self._delivery: ImageDelivery | None = None
        self._encoding, self._fetcher = events.run(self._open(parts), timeout_s=_START_S)

    @classmethod
    def of_model(
        cls, events: LoopThread, config: ModelConfig, engine: EngineSettings, *, worker: str, incarnation: str
    ) -> Self | None:
        """None with a model of text.

        Raises:
            Unavailable: The vision part cannot be read, or its memory cannot be had.
        """
        if config.vision is None:
            return None
        parts = VisionParts.load(
            engine.model_dir,
            ImageEncoderSettings(),
            SystemClock(),
            CollectorRegistry(),
            device=engine.device,
        )
        return cls(events, parts, worker=worker, incarnation=incarnation)

    def bind(self, steps: StepLoop, taker: PrefillWorker) -> None:
        """Whom embeddings are handed to, and in which thread."""
        self._delivery = ImageDelivery(self._fetcher, steps, taker)

    def place(self, images: Sequence[PromptImage]) -> tuple[PlacedImage, ...]:
        """The images of a prompt, embedded here."""
        return tuple(
            PlacedImage(
                image.first_token, image.tokens, image.picture.digest, self._worker, self._incarnation
            )
            for image in images
        )

    def encode(
        self, request_id: str, images: Sequence[PromptImage], failed: Callable[[ServiceError], None]
    ) -> None:
        """Begin with a prompt's images; ``failed`` is called on the event loop if one cannot be embedded."""
        pictures = [image.picture for image in images]
        job = EncodeJob(request_id, tuple(EncodeImage(p.digest, p.tokens, p.data) for p in pictures))

        async def run() -> None:
            try:
                await self._encoding.run(job)
            except ServiceError as error:
                failed(error)

        asyncio.run_coroutine_threadsafe(run(), self._events.loop)

    def want(self, task: PrefillTask) -> None:
        """See ``ImageWants.want``."""
        assert self._delivery is not None
        self._delivery.want(task)

    def forget(self, task: PrefillTask) -> None:
        """See ``ImageWants.forget``."""
        assert self._delivery is not None
        self._delivery.forget(task)

    def close(self) -> None:
        """End what runs; before the loops end."""
        self._events.run(self._close(), timeout_s=2 * _START_S)

    async def _open(self, parts: VisionParts) -> tuple[ImageEncoding, ImageFetcher]:
        clock = SystemClock()
        encoding = ImageEncoding(
            parts.encoder,
            parts.store,
            ImageEncoderSettings(),
            LeaseTable(),
            worker=self._worker,
            incarnation=self._incarnation,
            clock=clock,
            metrics=parts.metrics,
        )
        encoding.start()
        fetcher = ImageFetcher(
            LocalSource(self._worker, encoding, parts.store),
            None,
            fingerprint=parts.encoder.fingerprint,
            use=PrefillImages(),
            clock=clock,
            metrics=ImageFetchMetrics(None),
        )
        return encoding, fetcher

    async def _close(self) -> None:
        await self._fetcher.stop()
        await self._encoding.stop()
