"""Settings of a prefill worker."""

from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.image_config import PrefillImages
from pydantic import BaseModel, ConfigDict, Field


class PrefillSettings(BaseModel):
    """What a prefill worker has beyond the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineSettings
    images: PrefillImages = PrefillImages()
    lease_ttl_s: float = Field(default=120.0, gt=0)  # to be pulled; the queue of the decode worker counts
