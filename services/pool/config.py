"""Settings of a pool: where the registry is, and how fast death is noticed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PoolConfig(BaseModel):
    """What all workers of an installation, and the routers, agree on.

    Attributes:
        redis_url: The registry.
        cluster_token_file: Holds the token every internal call carries.
        namespace: Prefix of all keys; two installations on one Redis differ in it.
        heartbeat_s: A worker says this often that it lives.
        lease_s: A worker not heard of for this long is gone.
        refresh_s: A view of the registry is read this often.
        redis_timeout_s: Of one call of the registry.
        start_timeout_s: From a worker's start to its first heartbeat.
        drain_timeout_s: For what runs when a worker is told to stop.
        restart_backoff_s: Pause before a dead worker is started again; doubles with each death in a row.
        restart_backoff_max_s: Longest such pause.
        machine: Workers of one machine share its store; empty is the host's name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    redis_url: str = "redis://127.0.0.1:6379/0"
    cluster_token_file: Path
    namespace: str = Field("epdserve", pattern=r"^[a-z][a-z0-9-]{0,40}$")
    heartbeat_s: float = Field(0.5, gt=0)
    lease_s: float = Field(5.0, gt=0)
    refresh_s: float = Field(0.25, gt=0)
    redis_timeout_s: float = Field(2.0, gt=0)
    start_timeout_s: float = Field(120.0, gt=0)
    drain_timeout_s: float = Field(30.0, ge=0)
    restart_backoff_s: float = Field(0.5, ge=0)
    restart_backoff_max_s: float = Field(30.0, ge=0)
    machine: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,253}$")

    @property
    def machine_name(self) -> str:
        """``machine``, or the host's name."""
        return self.machine or socket.gethostname()

    @model_validator(mode="after")
    def _several_heartbeats_a_lease(self) -> Self:
        # one late heartbeat must not look like a death
        if self.lease_s < 3 * self.heartbeat_s:
            raise ValueError(f"lease_s={self.lease_s} is under three heartbeats of {self.heartbeat_s} s")
        return self
