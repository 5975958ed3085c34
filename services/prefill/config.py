"""Settings of a prefill worker."""

from epdserve.services.engine.config import EngineSettings
from pydantic import BaseModel, ConfigDict, Field


class PrefillSettings(BaseModel):
    """What a prefill worker has beyond the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineSettings
    lease_ttl_s: float = Field(default=30.0, gt=0)  # how long a decode worker has to pull and say so
