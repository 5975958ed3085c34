"""Settings of workers that embed images, and of those that read embeddings."""

from enum import StrEnum

from epdserve.model.vision.pixels import ImageLimits
from pydantic import BaseModel, ConfigDict, Field


class ImageEncoderSettings(BaseModel):
    """Memory and limits of a vision encoder.

    Attributes:
        cache_bytes: Of embeddings; bounded by it, used longest ago goes first.
        keep_s: An image that was asked for stays so long for whoever is to fetch it.
        lease_ttl_s: How long embeddings that are lent stay.
        batch_patches: Patches that go through the tower together.
        decode_threads: That turn files into pixels.
        max_queued_bytes: Of files being worked on; more are refused.
        max_image_bytes, max_image_pixels, max_image_side, max_frames: Of one image; larger ones are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache_bytes: int = Field(default=32 * 2**20, ge=1)
    keep_s: float = Field(default=30.0, ge=0)
    lease_ttl_s: float = Field(default=30.0, gt=0)
    batch_patches: int = Field(default=16_384, ge=1)
    decode_threads: int = Field(default=1, ge=1)
    max_queued_bytes: int = Field(default=256 * 2**20, ge=1)
    max_image_bytes: int = Field(default=32 * 2**20, ge=1)
    max_image_pixels: int = Field(default=64_000_000, ge=1)
    max_image_side: int = Field(default=16_384, ge=1)
    max_frames: int = Field(default=1_000, ge=1)

    def limits(self) -> ImageLimits:
        """What is refused before it is decoded."""
        return ImageLimits(self.max_image_bytes, self.max_image_pixels, self.max_image_side, self.max_frames)


class ImageMode(StrEnum):
    """Where a prefill worker's embeddings come from."""

    OFF = "off"
    POOL = "pool"  # from encode workers
    LOCAL = "local"  # from a vision encoder in this process


class PrefillImages(BaseModel):
    """What a prefill worker does with images.

    Attributes:
        mode: OFF with a model of text, whatever stands here.
        staging_bytes: Where pulled embeddings arrive.
        recent_bytes: Of pulled embeddings that are kept for prompts that need them again.
        max_fetches: Images fetched at a time.
        fetch_deadline_s: From the wish for an image to its bytes; the vision encoder's queue counts.
        encoder: Of the vision encoder in this process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: ImageMode = ImageMode.POOL
    staging_bytes: int = Field(default=16 * 2**20, ge=1)
    recent_bytes: int = Field(default=32 * 2**20, ge=0)
    max_fetches: int = Field(default=4, ge=1)
    fetch_deadline_s: float = Field(default=30.0, gt=0)
    encoder: ImageEncoderSettings = ImageEncoderSettings()
