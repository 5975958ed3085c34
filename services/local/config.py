"""Settings of all roles in one process."""

from epdserve.services.engine.config import EngineSettings
from pydantic import BaseModel, ConfigDict, Field


class LocalSettings(BaseModel):
    """One engine's settings serve both roles; each has pages of its own, as two workers would."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineSettings
    swap_memory_bytes: int = Field(default=256 * 2**20, ge=0)
