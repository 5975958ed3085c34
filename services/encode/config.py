"""Settings of an encode worker."""

from pathlib import Path

from epdserve.services.engine.image_config import ImageEncoderSettings
from pydantic import Field


class EncodeSettings(ImageEncoderSettings):
    """The vision encoder's, and where its model is.

    Attributes:
        threads: Of the arithmetic library.
    """

    model_dir: Path
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
