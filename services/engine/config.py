"""Settings that every worker with a model has."""

from pathlib import Path

from epdserve.model.precision import Precision
from pydantic import BaseModel, ConfigDict, Field, model_validator


class StoreUse(BaseModel):
    """What a worker does with the store of its machine. Without a store all of it is left out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    call_deadline_s: float = Field(default=0.5, gt=0)  # of questions; a store that is slower counts as away
    transfer_deadline_s: float = Field(
        default=5.0, gt=0
    )  # to bring up a prompt's blocks, or to take what is offered
    portion_blocks: int = Field(default=64, ge=1)  # lent, or offered, in one call
    offload_pending_bytes: int = Field(default=256 * 2**20, ge=0)  # held for the store; more is dropped


class EngineSettings(BaseModel):
    """Model, memory and limits of one worker. Defaults suit the demo model on a laptop."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_dir: Path
    precision: Precision = Precision.F32Q
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)  # of the arithmetic library
    block_tokens: int = Field(default=32, ge=2, multiple_of=2)
    num_pages: int = Field(default=1024, ge=1)
    pages_memory_bytes: int | None = Field(default=None, ge=1)  # instead of num_pages
    max_running: int = Field(default=16, ge=1)  # requests in the step loop; one state slot each
    max_queued: int = Field(default=256, ge=1)  # requests that wait for a state slot or for pages
    chunk_tokens: int = Field(default=256, ge=1)  # prompt rows of one step, all requests together
    # Where prefills of deterministic requests are cut; rounded up to whole blocks, more than a window
    deterministic_cut_tokens: int = Field(default=2048, ge=1)
    window_slack_tokens: int = Field(default=0, ge=0)  # kept rows beyond the window in decoder replay
    max_context_tokens: int | None = Field(
        default=None, ge=1
    )  # prompt and output; None = what the pages hold
    staging_slots: int = Field(default=32, ge=1)  # tails readable by peers or being pulled
    max_overtakes: int = Field(default=64, ge=0)  # requests that may pass one that waits for pages
    store: StoreUse = StoreUse()

    @model_validator(mode="after")
    def _slots_cover_running(self) -> "EngineSettings":
        if self.staging_slots < self.max_running:
            raise ValueError(f"staging_slots={self.staging_slots} < max_running={self.max_running}")
        return self

    def page_count(self, page_bytes: int) -> int:
        """Pages to allocate.

        Raises:
            ValueError: ``pages_memory_bytes`` does not hold one page.
        """
        if self.pages_memory_bytes is None:
            return self.num_pages
        if self.pages_memory_bytes < page_bytes:
            raise ValueError(
                f"pages_memory_bytes={self.pages_memory_bytes} holds no page of {page_bytes} bytes"
            )
        return self.pages_memory_bytes // page_bytes
