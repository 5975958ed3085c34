"""Real stores over real NIXL, and workers without a model that offer blocks to them and read from them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from epdserve.kernels.checksum import host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.tails import rest_digest
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import BlockHash
from epdserve.services.engine.endpoint import from_wire, to_wire
from epdserve.services.engine.transfer_thread import ReadOutcome, TransferThread
from epdserve.services.errors import Unavailable
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.worker_runner import WorkerRunner
from epdserve.services.rpc.server import RpcServer, serve_prefill
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store_types import (
    CacheOwner,
    FetchedBlock,
    FetchRequest,
    FoundTail,
    OffloadBlock,
    OffloadRequest,
    OffloadResult,
    TailOffer,
)
from epdserve.services.types import (
    BlockRef,
    TailRef,
    TransferEndpoint,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
)
from support.fake_decode import worker_info
from support.fake_prefill import FakePrefill
from support.valkey import url_of, valkey_server
from support.waiting import until

TOKEN = "a-cluster-token-of-tests"
STORE = "epdserve.services.store.service"
PAYLOAD, PAGE = 8000, 8192
TAIL_PAYLOAD, TAIL = 12000, 12288
TOKENS = 4  # of a block
OWNER = CacheOwner(b"tenant a" * 2, b"root one" * 4)
OTHER = CacheOwner(b"tenant b" * 2, b"root one" * 4)
OTHER_ROOT = CacheOwner(b"tenant a" * 2, b"root two" * 4)
GEOMETRY = {
    "block_tokens": TOKENS,
    "payload_bytes": PAYLOAD,
    "page_bytes": PAGE,
    "tail_payload_bytes": TAIL_PAYLOAD,
    "tail_bytes": TAIL,
}
CALL_S = 5.0
START_S = 60.0


def name(number: int | str) -> bytes:
    """A block's hash."""
    return str(number).encode().ljust(16, b".")


def chain(label: str, count: int) -> tuple[bytes, ...]:
    """Hashes of blocks that follow one another."""
    return tuple(name(f"{label}{number}") for number in range(count))


def payload(block_hash: bytes, *, version: int = 0, nbytes: int = PAYLOAD) -> np.ndarray:
    """What a block of that name holds; ``version`` gives others."""
    return np.frombuffer(np.random.default_rng([version, *block_hash]).bytes(nbytes), np.uint8)


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
        **changes,
    }
    if folder is not None:
        directory = {"folder": str(folder), "capacity_bytes": 256 * PAGE}
        table["ssd"] = {"directories": [directory], "io_threads": 1, **changes.get("ssd", {})}
    return table


class FakeWorker(FakePrefill):
    """A worker's pages and slots for tails, readable by stores; and a reader of stores."""

    def __init__(self, worker: str, incarnation: str, *, pages: int = 64) -> None:
        super().__init__()
        self.worker, self.incarnation = worker, incarnation
        self.pages = StagingPool("pages", slot_bytes=PAGE, count=pages)
        self.tails = StagingPool("tails", slot_bytes=TAIL, count=8)
        self.inbox = StagingPool("inbox", slot_bytes=PAGE, count=pages)
        self.tail_inbox = StagingPool("tail_inbox", slot_bytes=TAIL, count=2)
        transfer = NixlTransfer(worker, loopback_only=True)
        for pool in (self.pages, self.tails, self.inbox, self.tail_inbox):
            transfer.register(pool.region)
        self.endpoint: TransferEndpoint = to_wire(transfer.endpoint())
        self.transfers = TransferThread(transfer, clock=SystemClock(), serves=lambda: True)
        self.server: RpcServer | None = None
        self.page_of = [self.pages.bytes_of(self.pages.acquire() or _none()) for _ in range(pages)]
        self.tail_of = [self.tails.bytes_of(self.tails.acquire() or _none()) for _ in range(8)]
        self.read_page = [self.inbox.bytes_of(self.inbox.acquire() or _none()) for _ in range(pages)]
        self.read_tail_slot = self.tail_inbox.bytes_of(self.tail_inbox.acquire() or _none())

    async def start(self) -> None:
        self.transfers.start()
        self.server = await serve_prefill(self, token=TOKEN)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(grace_s=0.1)
        await asyncio.to_thread(self.transfers.stop, timeout_s=5.0)

    def info(self, machine: str) -> WorkerInfo:
        assert self.server is not None
        return worker_info(
            self.worker,
            role=WorkerRole.PREFILL,
            incarnation=self.incarnation,
            address=self.server.address,
            machine=machine,
        )

    async def describe(self) -> WorkerDescription:
        return WorkerDescription(self.info(""), self.endpoint)

    # -- giving ---------------------------------------------------------------------------------------------

    def fill(self, page: int, block_hash: bytes, *, exact: bool = True, version: int = 0) -> BlockRef:
        """Put a sealed block into a page."""
        bytes_ = payload(block_hash, version=version)
        header = BlockHeader(BlockHash(block_hash), host_checksum(bytes_.data, block_hash), PAYLOAD, exact)
        self.page_of[page][:PAYLOAD] = bytes_
        self.page_of[page][PAYLOAD : PAYLOAD + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
        return BlockRef(page, 1, block_hash, header.checksum, exact)

    def offer(
        self,
        hashes: Sequence[bytes],
        *,
        first_page: int = 0,
        owner: CacheOwner = OWNER,
        exact: bool = True,
        version: int = 0,
        running: bool = False,
    ) -> OffloadRequest:
        """A chain in pages, as it would be offered."""
        refs = [
            self.fill(first_page + at, block_hash, exact=exact, version=version)
            for at, block_hash in enumerate(hashes)
        ]
        parents = [None, *hashes[:-1]]
        blocks = tuple(OffloadBlock(ref, parent) for ref, parent in zip(refs, parents, strict=True))
        return OffloadRequest(self.worker, self.incarnation, owner, blocks, running)

    def offer_tail(
        self,
        parent: bytes,
        after: Sequence[int],
        *,
        slot: int = 0,
        owner: CacheOwner = OWNER,
        exact: bool = True,
    ) -> TailOffer:
        """A tail in a slot, as it would be offered."""
        rest = rest_digest(np.asarray(after, np.int32))
        identity = bytes(a ^ b for a, b in zip(parent, rest, strict=True))
        bytes_ = payload(identity, nbytes=TAIL_PAYLOAD)
        self.tail_of[slot][:TAIL_PAYLOAD] = bytes_
        ref = TailRef(slot, 1, TAIL, host_checksum(bytes_.data, identity), exact)
        return TailOffer(self.worker, self.incarnation, owner, ref, identity, parent, len(after), rest)

    # -- taking ---------------------------------------------------------------------------------------------

    async def read(self, endpoint: TransferEndpoint, blocks: Sequence[FetchedBlock]) -> bool:
        """Pull lent blocks; whether every one is what its name promises, to the bit."""
        copies = [Copy("blocks", block.ref.page, "inbox", at, PAGE) for at, block in enumerate(blocks)]
        read = self.transfers.read(from_wire(endpoint), copies, deadline_s=CALL_S)
        assert await asyncio.wrap_future(read.future) is ReadOutcome.DONE
        return all(
            np.array_equal(self.read_page[at][:PAYLOAD], payload(block.ref.block_hash))
            and host_checksum(self.read_page[at][:PAYLOAD].data, block.ref.block_hash) == block.ref.checksum
            for at, block in enumerate(blocks)
        )

    async def read_tail(self, endpoint: TransferEndpoint, found: FoundTail) -> bool:
        """Pull a lent tail; whether it is what its identity promises."""
        copy = Copy("tails", found.tail.slot, "tail_inbox", 0, TAIL)
        read = self.transfers.read(from_wire(endpoint), [copy], deadline_s=CALL_S)
        assert await asyncio.wrap_future(read.future) is ReadOutcome.DONE
        wanted = payload(found.identity, nbytes=TAIL_PAYLOAD)
        return np.array_equal(self.read_tail_slot[:TAIL_PAYLOAD], wanted)


@dataclass
class Stage:
    """A registry, stores and workers. Owned by one event loop."""

    pool: PoolConfig
    registry: Registry
    http: httpx.AsyncClient
    exits: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    runners: dict[str, WorkerRunner] = field(default_factory=dict)
    workers: dict[str, tuple[FakeWorker, str]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _clients: dict[tuple[str, str], StoreClient] = field(default_factory=dict)

    async def store(self, worker: str = "store-0", *, machine: str = "m0", **role: Any) -> WorkerInfo:
        """A store in this process."""
        pool = self.pool.model_copy(update={"machine": machine})
        runner = WorkerRunner(worker, module=STORE, pool=pool, role=role)
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
        before = {info.worker: info.incarnation for info in (await self.registry.list()).workers}
        pool = self.pool.model_copy(update={"machine": machine}).model_dump(mode="json")
        script = f"from support.pools import serve_here; serve_here(*{(worker, STORE, pool, role)!r})"
        process = self.processes[worker] = _start_process(script, env or {})
        self.exits.callback(_end_process, process)
        async with asyncio.timeout(START_S):
            while True:
                info = await self.info(worker)
                if info is not None and info.incarnation != before.get(worker):
                    return info
                assert process.poll() is None, f"{worker} ended with {process.poll()}"
                await asyncio.sleep(0.02)

    def kill(self, worker: str) -> None:
        """SIGKILL a store's process."""
        self.processes[worker].send_signal(signal.SIGKILL)
        self.processes[worker].wait(10)

    async def info(self, worker: str) -> WorkerInfo | None:
        """A worker's facts, if the registry has them."""
        found = [info for info in (await self.registry.list()).workers if info.worker == worker]
        return found[0] if found else None

    async def worker(self, worker: str = "prefill-0", *, machine: str = "m0", **more: Any) -> FakeWorker:
        """A worker without a model, in the registry until the test ends."""
        incarnation = await self.registry.claim(worker)
        fake = FakeWorker(worker, incarnation, **more)
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

    def service(self, worker: str = "store-0") -> Any:
        """The service of a store in this process, for looking inside."""
        return self.runners[worker]._service

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
            memory = self.service(worker)._memory
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
            memory, saver = self.service(worker)._memory, self.service(worker)._saver

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
            **{"heartbeat_s": 0.1, "refresh_s": 0.05, "redis_timeout_s": 1.0, **changes},
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


def ready(info: WorkerInfo) -> bool:
    """Whether a worker takes work."""
    return info.state is WorkerState.READY


def taken_results(count: int) -> list[str]:
    """What a store says of ``count`` new blocks."""
    return [str(OffloadResult.TAKEN)] * count


def _start_process(script: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    tests = str(Path(__file__).parent.parent)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1", **env},
    )


def _end_process(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _none() -> Any:
    raise AssertionError("a fresh pool has slots")
