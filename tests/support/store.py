"""Real stores over real NIXL, and workers without a model that offer blocks to them and read from them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import httpx
from epdserve.services.errors import Unavailable
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.worker_runner import WorkerRunner
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store_types import FetchedBlock, FetchRequest, OffloadRequest, OffloadResult
from epdserve.services.types import WorkerInfo
from support.store_process import MODULE, run
from support.store_worker import CALL_S, GEOMETRY, OWNER, PAGE, TAIL, TOKEN, FakeWorker
from support.valkey import url_of, valkey_server
from support.waiting import until

START_S = 60.0

_context = multiprocessing.get_context("forkserver")
# What takes seconds to import, once for all stores. The fork server of Python 3.11 finds installed modules only.
_context.set_forkserver_preload(["nixl._api", "epdserve.kvstore.transfer.nixl", MODULE])
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # read when nixl is imported, which is in the fork server


def role_table(
    folder: Path | None = None, *, blocks: int = 64, tails: int = 8, **changes: Any
) -> dict[str, Any]:
    """Settings of a small store; with a folder it has an SSD tier."""
    host_bytes = blocks * PAGE + tails * TAIL
    table: dict[str, Any] = {
        "geometry": GEOMETRY,
        "host_bytes": host_bytes,
        "tail_share": (tails * TAIL + 1) / host_bytes,
        "batch_blocks": 8,
        "directory_deadline_s": 2.0,  # a busy machine is slow
        "peer_deadline_s": 5.0,
        **changes,
    }
    if folder is not None:
        directory = {"folder": str(folder), "capacity_bytes": 256 * PAGE}
        table["ssd"] = {"directories": [directory], "io_threads": 1, **changes.get("ssd", {})}
    return table


@dataclass
class Stage:
    """A registry, stores and workers. Owned by one event loop."""

    pool: PoolConfig
    registry: Registry
    http: httpx.AsyncClient
    exits: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    runners: dict[str, WorkerRunner] = field(default_factory=dict)
    workers: dict[str, tuple[FakeWorker, str]] = field(default_factory=dict)
    processes: dict[str, ForkServerProcess] = field(default_factory=dict)
    _clients: dict[tuple[str, str], StoreClient] = field(default_factory=dict)

    async def store(self, worker: str = "store-0", *, machine: str = "m0", **role: Any) -> WorkerInfo:
        """A store in this process."""
        pool = self.pool.model_copy(update={"machine": machine})
        runner = WorkerRunner(worker, module=MODULE, pool=pool, role=role)
        info = await runner.start()
        running = asyncio.create_task(runner.run(), name=worker)

        async def stop() -> None:
            runner.ask_to_stop(0.0)
            async with asyncio.timeout(30):
                await running

        self.runners[worker] = runner
        self.exits.push_async_callback(stop)
        return info

    async def end(self, worker: str) -> None:
        """Stop a store of this process; ending it again at the end of the test does nothing."""
        runner = self.runners.pop(worker)
        runner.ask_to_stop(0.0)
        async with asyncio.timeout(START_S):
            while await self.info(worker) is not None:  # noqa: ASYNC110 - the registry is another process
                await asyncio.sleep(0.02)

    async def spawn(
        self, worker: str, *, machine: str = "m0", env: Mapping[str, str] | None = None, **role: Any
    ) -> WorkerInfo:
        """A store in a process of its own, maybe another life of it."""
        before = {info.worker: info.incarnation for info in await self._listed()}
        process = await self.launch(worker, machine=machine, env=env, **role)
        async with asyncio.timeout(START_S):
            while True:
                info = await self.info(worker)
                if info is not None and info.incarnation != before.get(worker):
                    return info
                assert process.is_alive(), f"{worker} ended with {process.exitcode}"
                await asyncio.sleep(0.02)

    async def launch(
        self, worker: str, *, machine: str = "m0", env: Mapping[str, str] | None = None, **role: Any
    ) -> ForkServerProcess:
        """A store's process; the registry need not be there."""
        pool = self.pool.model_copy(update={"machine": machine}).model_dump(mode="json")
        process = _context.Process(target=run, args=(worker, pool, role, dict(env or {})), daemon=True)
        await asyncio.to_thread(process.start)  # the first one starts the fork server
        self.processes[worker] = process
        self.exits.callback(_end_process, process)
        return process

    def kill(self, worker: str) -> None:
        """SIGKILL a store's process."""
        self.processes[worker].kill()
        self.processes[worker].join(10)

    def freeze(self, worker: str) -> None:
        """SIGSTOP a store's process; it is thawed at the end at the latest."""
        process = self.processes[worker]
        os.kill(process.pid or 0, signal.SIGSTOP)
        self.exits.callback(self.thaw, process)

    def thaw(self, process: ForkServerProcess) -> None:
        """SIGCONT."""
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGCONT)

    async def info(self, worker: str) -> WorkerInfo | None:
        """A worker's facts, if the registry has them."""
        found = [info for info in await self._listed() if info.worker == worker]
        return found[0] if found else None

    async def _listed(self) -> tuple[WorkerInfo, ...]:
        """What the registry has; asked again if it does not answer, as on a busy machine or after an outage."""
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(Unavailable):
                    return (await self.registry.list()).workers

    async def worker(self, worker: str = "prefill-0", *, machine: str = "m0", **more: Any) -> FakeWorker:
        """A worker without a model, in the registry until the test ends."""
        incarnation = await self.registry.claim(worker)
        fake = await asyncio.to_thread(FakeWorker, worker, incarnation, **more)
        await fake.start()
        self.exits.push_async_callback(fake.stop)
        self.workers[worker] = (fake, machine)
        await self.registry.publish(fake.info(machine))
        return fake

    async def beat(self) -> None:
        """Heartbeats of the fake workers, for as long as the test runs."""
        while True:
            await asyncio.sleep(0.5)
            for fake, machine in list(self.workers.values()):
                with contextlib.suppress(Unavailable):  # the registry may be away
                    await self.registry.publish(fake.info(machine))

    async def client(self, worker: str = "store-0") -> StoreClient:
        """A client of the present life of a store."""
        async with asyncio.timeout(CALL_S):
            while (info := await self.info(worker)) is None:  # noqa: ASYNC110 - the registry is another process
                await asyncio.sleep(0.02)
        key = (worker, info.address)
        if key not in self._clients:
            client = StoreClient(info.address, token=TOKEN, worker=worker)
            self._clients[key] = await self.exits.enter_async_context(client)
        return self._clients[key]

    def parts(self, worker: str = "store-0") -> Any:
        """The parts of a store in this process, for looking inside."""
        return self.runners[worker]._service._parts

    async def metric(self, worker: str, sample: str) -> float:
        """A sample of a store's metrics; 0 if absent."""
        info = await self.info(worker)
        assert info is not None
        text = (await self.http.get(f"http://{info.metrics_address}/metrics")).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {found: float(value) for found, _, value in lines}.get(sample, 0.0)

    def check(self) -> None:
        """Nothing is held, leaked or miscounted in any store of this process."""
        for worker in self.runners:
            memory = self.parts(worker).memory
            memory.tails.expire()
            memory.check()
            for pool, holder in ((memory.block_slots, memory.cache), (memory.tail_slots, memory.tails)):
                assert pool.counts().held == len(holder), f"{worker}: {pool.counts()}, {len(holder)} held"
                assert pool.counts().quarantined == 0
            assert memory.cache.pinned() == memory.tails.pinned() == 0
            assert memory.leases.counts().held == 0

    async def settle(self, *, timeout_s: float = 10.0) -> None:
        """Wait until nothing is lent, pinned or waiting to be saved any more, then ``check``."""
        for worker in self.runners:
            memory, saver = self.parts(worker).memory, self.parts(worker).saver

            def left(memory: Any = memory, saver: Any = saver) -> dict[str, int]:
                return {
                    "unsaved": saver.unsaved,
                    "pinned blocks": memory.cache.pinned(),
                    "pinned tails": memory.tails.pinned(),
                    "leases": memory.leases.counts().held,
                    "quarantined": memory.block_slots.counts().quarantined,
                }

            with contextlib.suppress(TimeoutError):
                await until(lambda: not any(left().values()), timeout_s=timeout_s)
            assert not any(left().values()), f"{worker} holds {left()}"
        self.check()


async def offload(client: StoreClient, request: OffloadRequest) -> list[str]:
    """Offer blocks; what became of each."""
    return [str(result) for result in await client.offload(request, deadline_s=CALL_S)]


async def fetch(client: StoreClient, hashes: Sequence[bytes], **more: Any) -> tuple[list[FetchedBlock], str]:
    """Fetch a chain; the blocks lent and their lease."""
    request = FetchRequest(more.pop("owner", OWNER), tuple(hashes), **more)
    blocks: list[FetchedBlock] = []
    lease = ""
    async for batch in client.fetch(request, deadline_s=CALL_S):
        blocks += batch.blocks
        lease = batch.lease
    return blocks, lease


async def taken(
    stage: Stage, reader: FakeWorker, hashes: Sequence[bytes], worker: str = "store-0", **more: Any
) -> list[str]:
    """Fetch a chain, read it, prove every byte, end the lease; the tiers it came from."""
    client, info = await stage.client(worker), await stage.info(worker)
    assert info is not None
    description = await client.describe(deadline_s=CALL_S)
    blocks, lease = await fetch(client, hashes, **more)
    assert [block.ref.block_hash for block in blocks] == list(hashes[: len(blocks)])
    if blocks:
        assert await reader.read(description.endpoint, blocks)
        assert await client.end_fetch(lease, incarnation=info.incarnation, deadline_s=CALL_S)
    return [str(block.tier) for block in blocks]


@asynccontextmanager
async def stage(folder: Path, url: str | None = None, **changes: Any) -> AsyncIterator[Stage]:
    """A registry and nothing in it; what is started in it ends with it. At the end no store holds anything."""
    token = folder / "token"
    token.write_text(TOKEN)
    with valkey_url(url) as redis_url:
        config = PoolConfig(
            redis_url=redis_url,
            cluster_token_file=token,
            **{"heartbeat_s": 0.1, "refresh_s": 0.05, "redis_timeout_s": 2.0, **changes},
        )
        async with (
            Registry(redis_url, namespace=config.namespace) as registry,
            httpx.AsyncClient(trust_env=False, timeout=10, verify=False) as http,
        ):
            started = Stage(config, registry, http)
            async with started.exits:
                beating = asyncio.create_task(started.beat())
                started.exits.callback(beating.cancel)
                yield started
                await started.settle()
    await _no_tasks_left()


async def _no_tasks_left() -> None:
    """Every task of a store that has stopped has ended, or ends when it is cancelled."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    stubborn: list[str] = []
    for attempt in range(20):
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=0.5)
        left = {task for task in left if not task.done()}
        if attempt == 0:
            stubborn = [f"{task.get_name()}: {task.get_stack(limit=3)}" for task in left]
    assert stubborn == []


@contextmanager
def valkey_url(url: str | None) -> Iterator[str]:
    """A server of its own, unless there is one already: it is emptied then."""
    if url is not None:
        import redis

        with redis.Redis.from_url(url) as client:
            client.flushall()
        yield url
        return
    with valkey_server() as server:
        yield url_of(server)


def taken_results(count: int) -> list[str]:
    """What a store says of ``count`` new blocks."""
    return [str(OffloadResult.TAKEN)] * count


def _end_process(process: ForkServerProcess) -> None:
    if process.is_alive():
        process.terminate()
        process.join(15)
        process.kill()
        process.join(5)
