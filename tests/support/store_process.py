"""What runs in the process of a store that a test starts and kills."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.worker_runner import WorkerRunner
from epdserve.services.store_types import FetchBatch

MODULE = "epdserve.services.store.service"
DOOM = "STORE_DOOM"  # in the environment: file of orders
_UNDER_WAY_S = 0.1  # from lending a batch to the reader's being amid it
_PR_SET_PDEATHSIG = 1
_TESTS = str(Path(__file__).parent.parent)


def run(worker: str, pool: dict[str, Any], role: dict[str, Any], env: Mapping[str, str]) -> None:
    """Serve until SIGTERM. The process ends with the fork server."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(env)
    if "LD_PRELOAD" in env:  # is read when a program begins
        left = {name: value for name, value in env.items() if name != "LD_PRELOAD"}
        script = f"from support.store_process import run; run(*{(worker, pool, role, left)!r})"
        os.environ["PYTHONPATH"] = os.pathsep.join([_TESTS, os.environ.get("PYTHONPATH", "")])
        os.execv(sys.executable, [sys.executable, "-P", "-c", script])
    sys.setswitchinterval(0.0005)  # as in an actor
    if DOOM in env:
        _doom_fetches(Path(env[DOOM]))
    asyncio.run(_serve(WorkerRunner(worker, module=MODULE, pool=PoolConfig.model_validate(pool), role=role)))


def _doom_fetches(order: Path) -> None:
    """Let this process signal itself when it has just lent a batch, if ``order`` names one; once."""
    from epdserve.services.store.service import StoreService

    fetch = StoreService.fetch

    def obey(store: StoreService) -> None:
        if not order.exists():
            return
        number = signal.Signals[order.read_text()]
        order.unlink()
        transfer = store._parts.transfers._transfer
        transfer.progress = lambda: None  # type: ignore[method-assign]  # so that the read is not over before

        def end() -> None:
            del transfer.progress
            os.kill(os.getpid(), number)

        asyncio.get_running_loop().call_later(_UNDER_WAY_S, end)

    async def fetch_and_obey(
        self: StoreService, *arguments: Any, **more: Any
    ) -> AsyncGenerator[FetchBatch, None]:
        async with contextlib.aclosing(fetch(self, *arguments, **more)) as batches:
            async for batch in batches:
                obey(self)
                yield batch

    StoreService.fetch = fetch_and_obey  # type: ignore[method-assign]


async def _serve(runner: WorkerRunner) -> None:
    await runner.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runner.ask_to_stop, 0.0)
    await runner.run()
