"""Settings of a decode worker."""

from epdserve.services.engine.config import EngineSettings
from pydantic import BaseModel, ConfigDict, Field


class DecodeSettings(BaseModel):
    """What a decode worker has beyond the engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: EngineSettings
    handoff_deadline_s: float = Field(
        default=5.0, gt=0
    )  # look the peer up, pull, verify; then recompute here
    lease_call_deadline_s: float = Field(default=2.0, gt=0)
    swap_memory_bytes: int = Field(default=256 * 2**20, ge=0)  # host memory for preempted requests
