"""Settings of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from epdserve.kvstore.ssd.retention import DAY_S, Mode
from epdserve.model.precision import Precision
from pydantic import BaseModel, ConfigDict, Field, model_validator


class GeometrySettings(BaseModel):
    """Sizes of blocks and tails, for a store that is to know no model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_tokens: int = Field(ge=2)
    payload_bytes: int = Field(ge=8)
    page_bytes: int = Field(ge=4096, multiple_of=4096)
    tail_payload_bytes: int = Field(ge=8)
    tail_bytes: int = Field(ge=4096, multiple_of=4096)


class SsdDirectorySettings(BaseModel):
    """A directory, best one a drive; all of ``capacity_bytes`` is allocated at start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    capacity_bytes: int = Field(ge=1)


class SsdTierSettings(BaseModel):
    """The SSD tier; without a directory there is none. What the rules mean stands in ``kvstore/README.md``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directories: tuple[SsdDirectorySettings, ...] = ()
    floor_s: int = Field(default=3 * DAY_S, ge=0)
    mode: Mode = Mode.FLOOR
    reserve_ratio: float = Field(default=0.01, ge=0, lt=0.5)
    low_free_ratio: float = Field(default=0.02, ge=0, lt=0.5)
    high_free_ratio: float = Field(default=0.04, ge=0, lt=0.5)
    default_quota_bytes: int | None = Field(default=None, ge=0)
    bytes_per_day: int | None = Field(default=None, ge=0)
    second_hit_blocks: int = Field(default=0, ge=0)
    write_behind_blocks: int = Field(default=128, ge=1)
    io_threads: int = Field(default=4, ge=0)  # a drive

    @model_validator(mode="after")
    def _watermarks_in_order(self) -> Self:
        if self.low_free_ratio > self.high_free_ratio:
            raise ValueError(f"low_free_ratio={self.low_free_ratio} > high_free_ratio={self.high_free_ratio}")
        return self


class StoreSettings(BaseModel):
    """Memory, disks and bounds of one store. Defaults suit the demo model on a laptop.

    Attributes:
        model_dir: Blocks and tails are those of this model, at this precision and block length.
        geometry: Their sizes, instead of a model.
        host_bytes: Memory for blocks and tails together.
        tail_share: Of it for tails.
        tail_ttl_s: How long a tail is found.
        lease_ttl_s: How long what is lent stays, beyond the call that lends it.
        batch_blocks: Blocks that are read, verified and lent together.
        threads: That verify, and wait for disks.
        max_offload_blocks: Being read from workers at a time; more are refused.
        max_fetches: Under way at a time; more are refused.
        max_unsaved_blocks: Waiting for the SSD tier, pinned meanwhile; more are kept in memory only.
        offload_deadline_s: Longest that one offer may take.
        ask_peers: Look for blocks and tails on other machines.
        keep_pulled: Store blocks of peers on the own disks too, so that a chain lies in one place.
        peer_deadline_s: Of what is asked of a peer.
        directory_deadline_s: Of a question to the directory of tails.
        republish_s: How often held tails are told again, a few at a time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_dir: Path | None = None
    precision: Precision = Precision.F32Q
    block_tokens: int = Field(default=32, ge=2, multiple_of=2)
    geometry: GeometrySettings | None = None
    host_bytes: int = Field(default=64 * 2**20, ge=1)
    tail_share: float = Field(default=0.10, gt=0, lt=1)
    tail_ttl_s: float = Field(default=300.0, gt=0)
    lease_ttl_s: float = Field(default=30.0, gt=0)
    batch_blocks: int = Field(default=32, ge=1)
    threads: int = Field(default=2, ge=1)
    max_offload_blocks: int = Field(default=512, ge=1)
    max_fetches: int = Field(default=64, ge=1)
    max_unsaved_blocks: int = Field(default=256, ge=1)
    offload_deadline_s: float = Field(default=5.0, gt=0)
    ask_peers: bool = True
    keep_pulled: bool = True
    peer_deadline_s: float = Field(default=2.0, gt=0)
    directory_deadline_s: float = Field(default=0.1, gt=0)
    republish_s: float = Field(default=5.0, gt=0)
    ssd: SsdTierSettings = SsdTierSettings()

    @model_validator(mode="after")
    def _one_source_of_sizes(self) -> Self:
        if (self.model_dir is None) == (self.geometry is None):
            raise ValueError("a store needs either model_dir or geometry")
        return self
