"""Prefill and decode workers with their servers, as a router would meet them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.worker_runner import WorkerRunner
from epdserve.services.rpc.client import PrefillClient
from epdserve.services.rpc.decode_session import DecodeSession
from epdserve.services.types import (
    DecodeJob,
    KVHandle,
    PrefillJob,
    PrefillResult,
    SamplingParams,
    TokenChunk,
    WorkerInfo,
    WorkerState,
    token_ids,
)
from support.engine import BLOCK_TOKENS, TENANT
from support.golden import TINY
from support.valkey import url_of, valkey_server

TOKEN = "a-cluster-token-of-tests"
PREFILL, DECODE = "epdserve.services.prefill.service", "epdserve.services.decode.service"
STORE = "epdserve.services.store.service"
CALL_S = 20.0
START_S = 60.0


def engine_table(**changes: Any) -> dict[str, Any]:
    """Engine settings of a small worker, as they stand in a file."""
    return {
        "model_dir": str(TINY),
        "block_tokens": BLOCK_TOKENS,
        "num_pages": 96,
        "max_running": 8,
        "staging_slots": 16,
        "chunk_tokens": 64,
        **changes,
    }


def worker_table(folder: Path, worker: str, **engine: Any) -> dict[str, Any]:
    """What the pool hands to ``build``; no registry answers at its address."""
    pool = {
        "redis_url": "redis://127.0.0.1:1/0",
        "cluster_token_file": str(folder / "token"),
        "redis_timeout_s": 0.2,
    }
    return {
        "worker": worker,
        "incarnation": "7",
        "cluster_token": TOKEN,
        "pool": pool,
        "role": {"engine": engine_table(**engine)},
    }


@dataclass
class Pools:
    """Live workers by name, and a client of each. Owned by one event loop."""

    folder: Path
    pool: PoolConfig
    registry: Registry
    http: httpx.AsyncClient
    runners: dict[str, WorkerRunner] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    exits: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    _stops: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _clients: dict[str, PrefillClient] = field(default_factory=dict)
    _sessions: dict[str, DecodeSession] = field(default_factory=dict)

    async def start(self, worker: str, module: str, **role: Any) -> WorkerInfo:
        """A worker in this process."""
        runner = WorkerRunner(worker, module=module, pool=self.pool, role=role)
        info = await runner.start()
        running = asyncio.create_task(runner.run(), name=worker)

        async def stop() -> None:
            runner.ask_to_stop(0.0)
            async with asyncio.timeout(30):
                await running

        self.runners[worker] = runner
        self._stops[worker] = stop
        self.exits.push_async_callback(stop)
        return info

    async def stop(self, worker: str) -> None:
        """End a worker of this process, and wait until it is not listed any more."""
        await self._stops[worker]()
        async with asyncio.timeout(CALL_S):
            while any(info.worker == worker for info in (await self.registry.list()).workers):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def _spawn(self, worker: str, module: str, env: Mapping[str, str], **role: Any) -> None:
        arguments = (worker, module, self.pool.model_dump(mode="json"), role)
        script = f"from support.pools import serve_here; serve_here(*{arguments!r})"
        tests = str(Path(__file__).parent.parent)
        self.processes[worker] = subprocess.Popen(
            [sys.executable, "-P", "-c", script],
            env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1", **env},
            stderr=subprocess.DEVNULL,
        )
        self.exits.callback(self._end_process, worker)

    async def spawn(self, worker: str, module: str, env: Mapping[str, str], **role: Any) -> WorkerInfo:
        """A worker in a process of its own."""
        self._spawn(worker, module, env, **role)
        return await self.listed(worker, within_s=START_S)

    async def listed(self, worker: str, *, within_s: float = 5.0) -> WorkerInfo:
        """A worker's facts, once the registry has them."""
        async with asyncio.timeout(within_s):
            while True:
                for info in (await self.registry.list()).workers:
                    if info.worker == worker:
                        return info
                await asyncio.sleep(0.05)

    def signal(self, worker: str, number: signal.Signals) -> None:
        """Send a signal to a worker's process."""
        self.processes[worker].send_signal(number)

    async def prefill(
        self, worker: str, tokens: Sequence[int] | np.ndarray, *, exact: bool = False, **more: Any
    ) -> PrefillResult:
        """Fill KV for a prompt."""
        ids = token_ids(np.asarray(tokens, dtype=np.int64))
        job = PrefillJob(f"p{next(self._numbers)}", ids, TENANT, exact, **more)
        return await (await self.client(worker)).run(job, deadline_s=CALL_S)

    async def client(self, worker: str) -> PrefillClient:
        """A client of a prefill worker."""
        if worker not in self._clients:
            info = await self.listed(worker)
            client = PrefillClient(info.address, token=TOKEN, worker=worker)
            self._clients[worker] = await self.exits.enter_async_context(client)
        return self._clients[worker]

    async def session(self, worker: str) -> DecodeSession:
        """The stream to a decode worker."""
        if worker not in self._sessions:
            info = await self.listed(worker)
            session = DecodeSession(info.address, token=TOKEN, router_id="test", worker=worker)
            self._sessions[worker] = await self.exits.enter_async_context(session)
        return self._sessions[worker]

    def job(
        self,
        tokens: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        handle: KVHandle | None,
        **more: Any,
    ) -> DecodeJob:
        """A decode job with an id of its own."""
        name = f"d{next(self._numbers)}"
        return DecodeJob(
            request_id=name,
            tokens=token_ids(np.asarray(tokens, dtype=np.int64)),
            tenant_key=TENANT,
            sampling=sampling,
            handle=handle,
            **{"exact": False, **more},
        )

    async def decode(self, worker: str, job: DecodeJob) -> tuple[list[int], TokenChunk]:
        """All tokens of a job and its last chunk."""
        session, tokens = await self.session(worker), []
        async for chunk in session.submit(job, deadline_s=CALL_S):
            tokens += chunk.tokens
        return tokens, chunk

    async def generate(
        self, tokens: Sequence[int] | np.ndarray, sampling: SamplingParams, *, exact: bool = False
    ) -> tuple[list[int], TokenChunk]:
        """Prefill on ``prefill-0``, decode on ``decode-0``."""
        result = await self.prefill("prefill-0", tokens, exact=exact)
        return await self.decode("decode-0", self.job(tokens, sampling, result.handle, exact=exact))

    async def metrics(self, worker: str) -> dict[str, float]:
        """Samples of a worker's metrics, labels included in the names."""
        info = await self.listed(worker)
        text = (await self.http.get(f"http://{info.metrics_address}/metrics")).text
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def metric(self, worker: str, name: str) -> float:
        """One sample; 0 if absent."""
        return (await self.metrics(worker)).get(name, 0.0)

    async def until_running(self, worker: str) -> None:
        """Wait until a worker has a request in its step loop."""
        async with asyncio.timeout(CALL_S):
            while not await self.metric(  # noqa: ASYNC110 - the worker is another process
                worker, "epdserve_engine_running_requests"
            ):
                await asyncio.sleep(0.005)

    async def until_state(self, worker: str, state: WorkerState) -> None:
        """Wait until a worker's heartbeat says so."""
        async with asyncio.timeout(CALL_S):
            while (await self.listed(worker)).state is not state:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def assert_conserved(self, *workers: str, within_s: float = 5.0) -> None:
        """Everything that requests held is free again; quarantined pages too."""
        held = ("filling", "sealed", "quarantined")
        names = [f'epdserve_kvstore_pages{{phase="{phase}"}}' for phase in held]
        names += ["epdserve_engine_leaked_pages", "epdserve_kvstore_pages_missing", "epdserve_kvstore_leases"]
        deadline = time.monotonic() + within_s
        for worker in workers:
            while left := {
                name: n for name, n in (await self.metrics(worker)).items() if n and name in names
            }:
                assert time.monotonic() < deadline, f"{worker} holds {left}"
                await asyncio.sleep(0.02)

    def _end_process(self, worker: str) -> None:
        process = self.processes[worker]
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


@asynccontextmanager
async def pools(folder: Path, **changes: Any) -> AsyncIterator[Pools]:
    """A registry and nothing in it; what is started in it ends with it."""
    token = folder / "token"
    token.write_text(TOKEN)
    with valkey_server() as valkey:
        settings = {"heartbeat_s": 0.1, "lease_s": 5.0, **changes}
        config = PoolConfig(redis_url=url_of(valkey), cluster_token_file=token, **settings)
        async with (
            Registry(config.redis_url, namespace=config.namespace) as registry,
            httpx.AsyncClient(trust_env=False, timeout=10, verify=False) as http,
        ):
            started = Pools(folder, config, registry, http)
            async with started.exits:
                yield started


def serve_here(worker: str, module: str, pool: dict[str, Any], role: dict[str, Any]) -> None:
    """Run one worker until SIGTERM; the main function of a spawned process."""

    async def serve() -> None:
        runner = WorkerRunner(worker, module=module, pool=PoolConfig.model_validate(pool), role=role)
        await runner.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, runner.ask_to_stop, 0.0)
        await runner.run()

    asyncio.run(serve())
