"""What a process with a vision encoder has: the encoder, its memory, its books. Put together once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epdserve.kvstore.clock import Clock
from epdserve.model.config import ModelConfig
from epdserve.model.errors import ModelError
from epdserve.model.vision.encoder import VisionEncoder
from epdserve.model.vision.tensors import vision_of
from epdserve.services.engine.embedding_store import EmbeddingStore
from epdserve.services.engine.image_config import ImageEncoderSettings
from epdserve.services.engine.image_metrics import EmbeddingMetrics
from epdserve.services.errors import Unavailable
from prometheus_client import CollectorRegistry


@dataclass(frozen=True, slots=True, eq=False)
class VisionParts:
    """Without threads and event loop."""

    encoder: VisionEncoder
    store: EmbeddingStore
    metrics: EmbeddingMetrics

    @staticmethod
    def load(
        model_dir: Path,
        settings: ImageEncoderSettings,
        clock: Clock,
        registry: CollectorRegistry,
        *,
        device: str = "cpu",
    ) -> VisionParts:
        """Read the vision part of a model and take the memory.

        Raises:
            Unavailable: The model takes no images or cannot be read, or the memory cannot be had.
        """
        metrics = EmbeddingMetrics(registry)
        try:
            config = ModelConfig.from_directory(model_dir)
            encoder = VisionEncoder.load(model_dir, config, device)
            store = EmbeddingStore(
                hidden=encoder.hidden_size,
                nbytes=settings.cache_bytes,
                max_tokens=vision_of(config).max_image_tokens,
                keep_s=settings.keep_s,
                clock=clock,
                metrics=metrics,
            )
        except (ModelError, OSError, ValueError) as error:
            raise Unavailable(f"model {model_dir}: {error}") from error
        return VisionParts(encoder, store, metrics)
