"""What runs in the process of a store that a test starts and kills."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.worker_runner import WorkerRunner

MODULE = "epdserve.services.store.service"
_PR_SET_PDEATHSIG = 1


def run(worker: str, pool: dict[str, Any], role: dict[str, Any], env: Mapping[str, str]) -> None:
    """Serve until SIGTERM. The process ends with the fork server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(env)
    sys.setswitchinterval(0.0005)  # as in an actor
    asyncio.run(_serve(WorkerRunner(worker, module=MODULE, pool=PoolConfig.model_validate(pool), role=role)))


async def _serve(runner: WorkerRunner) -> None:
    await runner.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runner.ask_to_stop, 0.0)
    await runner.run()
