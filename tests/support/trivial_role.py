"""A role that does nothing, for tests of the pool. Its settings say how it fails."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from epdserve.services.errors import Unavailable
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.types import WorkerInfo, WorkerRole, WorkerState


class TrivialService:
    """Tells facts about its process where a real worker tells its load."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self.stopped_with: float | None = None

    async def start(self) -> None:
        if message := self._settings.role.get("fail"):
            raise Unavailable(message)

    async def stop(self, drain_s: float) -> None:
        self.stopped_with = drain_s
        await asyncio.sleep(self._settings.role.get("stop_s", 0.0))

    def info(self) -> WorkerInfo:
        # tests/kernels is on the path and has no __init__: that one is not meant
        found = importlib.util.find_spec("kernels")
        shadowed = found is not None and found.origin is not None
        return WorkerInfo(
            worker=self._settings.worker,
            role=WorkerRole.DECODE,
            incarnation=self._settings.incarnation,
            address=f"{self._settings.host}:{os.getpid()}",
            metrics_address="",
            state=WorkerState.READY,
            cache_root=b"",
            block_tokens=1,
            max_context_tokens=1,
            queued_tokens=0,
            running=int(shadowed),
            free_pages=0,
            total_pages=0,
            step_age_s=0.0,
            wire_version=1,
            model_name=",".join(f"{name}={os.environ.get(name)}" for name in ("OMP_NUM_THREADS", "EXTRA")),
        )


def build(settings: Mapping[str, Any]) -> TrivialService:
    """The service."""
    return TrivialService(WorkerSettings.model_validate(settings))
