"""What a role must offer to be run by a pool: a module with ``build(settings) -> WorkerService``.

The pool finds the module by name, so it stays below the roles and knows none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from epdserve.services.pool.config import PoolConfig
from epdserve.services.types import WorkerInfo
from pydantic import BaseModel, ConfigDict, Field


class WorkerSettings(BaseModel):
    """What ``build`` gets, as ``model_dump(mode="json")``.

    Attributes:
        worker: Name of the worker, the same over its lives.
        incarnation: This life.
        cluster_token: Wanted on every call, sent with every call.
        host: Address to bind to.
        port: Of the gRPC server; 0 takes a free one.
        metrics_port: Likewise, of ``/metrics``.
        pool: Where the registry is, among others.
        role: The role's own settings, checked by the role.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")
    incarnation: str = Field(min_length=1)
    cluster_token: str = Field(min_length=16, repr=False)
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    metrics_port: int = Field(0, ge=0, le=65535)
    pool: PoolConfig
    role: dict[str, Any] = Field(default_factory=dict)


class WorkerService(Protocol):
    """One worker. Created, started and stopped on one event loop, once each."""

    async def start(self) -> None:
        """Load, listen, take work. Returns when work is taken.

        Raises:
            ServiceError, ConfigError: It cannot start; the message says why in one line. What had been opened
                is closed again: ``stop`` is not called.
        """
        ...

    async def stop(self, drain_s: float) -> None:
        """Take no new work, let what runs end for up to ``drain_s``, hand over or fail the rest, let go of all."""
        ...

    def info(self) -> WorkerInfo:
        """The facts of this moment, for a heartbeat; quick, on the event loop, between start and stop.

        Raises:
            ServiceError: The service is broken beyond repair: this life is to end and another one to begin.
        """
        ...


def build_service(module: str, settings: WorkerSettings) -> WorkerService:
    """The service of the role in a module.

    Raises:
        ModuleNotFoundError, AttributeError: There is no such role.
    """
    build = cast(Callable[[Mapping[str, Any]], WorkerService], importlib.import_module(module).build)
    return build(settings.model_dump(mode="json"))
