"""A role without a model, for tests of the pool: a fake decode worker. Its settings say how it fails."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from epdserve.services.errors import Internal, Unavailable
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.rpc.server import RpcServer, serve_decode
from epdserve.services.types import WorkerInfo, WorkerRole, WorkerState
from support.fake_decode import FakeDecode


class TrivialService:
    """Tells facts about its process where a real worker tells its load."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._server: RpcServer | None = None
        self._told = 0

    async def start(self) -> None:
        if message := self._settings.role.get("fail"):
            raise Unavailable(message)
        engine = FakeDecode(incarnation=self._settings.incarnation)
        self._server = await serve_decode(
            engine,
            engine.sessions,
            token=self._settings.cluster_token,
            address=f"{self._settings.host}:0",
        )
        self._stepping = asyncio.create_task(engine.run())

    async def stop(self, drain_s: float) -> None:
        self._stepping.cancel()
        if self._server is not None:
            await self._server.stop(grace_s=0.0)
        await asyncio.sleep(self._settings.role.get("stop_s", 0.0))

    def info(self) -> WorkerInfo:
        self._told += 1
        if self._told > self._settings.role.get("breaks_after", 1_000_000):
            raise Internal("broken")
        # tests/kernels is on the path and has no __init__: that one is not meant
        found = importlib.util.find_spec("kernels")
        shadowed = found is not None and found.origin is not None
        return WorkerInfo(
            worker=self._settings.worker,
            role=WorkerRole.DECODE,
            incarnation=self._settings.incarnation,
            address=self._server.address if self._server is not None else "",
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
