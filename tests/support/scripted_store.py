"""A store that does what a test says, over a transfer within the process: for faults that a real one hardly has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.kvstore.types import Endpoint, MemoryRegion
from epdserve.model.pools import aligned_bytes
from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.offload import Offloader
from epdserve.services.engine.preparing import Preparer
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.speeds import SpeedMeter
from epdserve.services.engine.store_link import Store
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.errors import ServiceError, WorkerLost
from epdserve.services.store_types import (
    BLOCKS,
    TAILS,
    CacheTier,
    FetchBatch,
    FetchedBlock,
    FetchRequest,
    FoundTail,
    OffloadRequest,
    OffloadResult,
    TailOffer,
    TailQuery,
    TierRun,
)
from epdserve.services.types import BlockRef, PrefillJob, TailRef, WorkerRole, token_ids
from prometheus_client import CollectorRegistry
from support.engine import TENANT, PrefillBench, make_runner
from support.fake_decode import worker_info


@dataclass
class ScriptedStore:
    """Implements what workers use of ``StoreClient``. Blocks are in ``held``, in the order of their slots.

    Attributes:
        batch: Blocks lent in one message.
        lease_holds: What ending a lease says.
        error: Raised by every call, if set; by ``fetch`` after ``error_after`` batches.
        gate: Waited for by every call.
    """

    fabric: LocalFabric
    page_bytes: int
    tail_bytes: int
    batch: int = 3
    lease_holds: bool = True
    error: ServiceError | None = None
    error_after: int = 0
    held: list[BlockRef] = field(default_factory=list)
    tiers: dict[bytes, CacheTier] = field(default_factory=dict)
    tail: FoundTail | None = None
    asked_tails: list[TailQuery] = field(default_factory=list)
    ended: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)
    offers: list[OffloadRequest] = field(default_factory=list)
    tail_offers: list[TailOffer] = field(default_factory=list)
    touched: list[tuple[bytes, ...]] = field(default_factory=list)
    answers: Callable[[OffloadRequest], tuple[OffloadResult, ...]] = lambda request: (
        (OffloadResult.TAKEN,) * len(request.blocks)
    )
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.blocks = aligned_bytes((64, self.page_bytes))
        self.tails = aligned_bytes((4, self.tail_bytes))
        self.transfer = LocalTransfer(self.fabric, "store-0")
        for name, memory in ((BLOCKS, self.blocks), (TAILS, self.tails)):
            self.transfer.register(MemoryRegion(name, memory.data_ptr(), memory.shape[1], len(memory)))

    def keep(self, bench: PrefillBench, tokens: Any, *, exact: bool = False) -> None:
        """Hold the blocks that a prefill of ``tokens`` makes."""
        handle = bench.run(tokens, exact=exact).handle
        for ref in handle.blocks:
            slot = len(self.held)
            self.blocks[slot] = bench.runner.pools.pages[ref.page]
            self.held.append(replace(ref, page=slot))
        bench.end_leases()

    def keep_tail(self, record: torch.Tensor, checksum: int, *, after_tokens: int, exact: bool) -> None:
        """Lend this tail for the first candidate of any question."""
        self.tails[1] = record
        ref = TailRef(1, 1, self.tail_bytes, checksum, exact)
        self.tail = FoundTail("tail-lease", "1", ref, b"i" * 16, 0, after_tokens, CacheTier.HOST)

    # -- calls ----------------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        await self.gate.wait()
        if self.error is not None and not self.error_after:
            raise self.error

    async def locate(
        self, hashes: tuple[bytes, ...], *, exact: bool = False, local_only: bool = False, deadline_s: float
    ) -> tuple[TierRun, ...]:
        await self._answer()
        known = {ref.block_hash: ref.exact for ref in self.held}
        runs: list[TierRun] = []
        for block_hash in hashes:
            if block_hash not in known or (exact and not known[block_hash]):
                break
            tier = self.tiers.get(block_hash, CacheTier.HOST)
            if runs and runs[-1].tier is tier:
                runs[-1] = TierRun(tier, runs[-1].blocks + 1)
            else:
                runs.append(TierRun(tier, 1))
        return tuple(runs)

    async def fetch(self, request: FetchRequest, *, deadline_s: float) -> AsyncGenerator[FetchBatch, None]:
        await self._answer()
        known = {ref.block_hash: ref for ref in self.held}
        wanted = [known[block_hash] for block_hash in request.hashes if block_hash in known]
        for number, at in enumerate(range(0, len(wanted), self.batch)):
            if self.error is not None and number == self.error_after:
                raise self.error
            refs = wanted[at : at + self.batch]
            blocks = tuple(FetchedBlock(ref, self.tiers.get(ref.block_hash, CacheTier.HOST)) for ref in refs)
            yield FetchBatch("lease", "1", blocks)

    async def end_fetch(
        self, lease: str, *, incarnation: str, suspects: tuple[bytes, ...] = (), deadline_s: float
    ) -> bool:
        self.ended.append((lease, suspects))
        return self.lease_holds

    async def fetch_tail(self, query: TailQuery, *, deadline_s: float) -> FoundTail | None:
        await self._answer()
        self.asked_tails.append(query)
        return self.tail

    async def offload(self, request: OffloadRequest, *, deadline_s: float) -> tuple[OffloadResult, ...]:
        await self._answer()
        self.offers.append(request)
        return self.answers(request)

    async def offload_tail(self, offer: TailOffer, *, deadline_s: float) -> OffloadResult:
        await self._answer()
        self.tail_offers.append(offer)
        return OffloadResult.TAKEN

    async def touch(self, hashes: tuple[bytes, ...], *, deadline_s: float) -> None:
        await self._answer()
        self.touched.append(hashes)

    async def close(self) -> None:
        pass


class ScriptedLink:
    """Implements what workers use of ``StoreLink``."""

    def __init__(self, client: ScriptedStore) -> None:
        info = worker_info("store-0", role=WorkerRole.STORE)
        self.client, self.present = client, True
        self.here = Store(info, client)  # type: ignore[arg-type]
        self.failures: list[str] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    def store(self) -> Store | None:
        return self.here if self.present else None

    async def endpoint(self, store: Store, *, deadline_s: float) -> Endpoint:
        return self.client.transfer.endpoint()

    def failed(self, store: Store, error: ServiceError) -> None:
        self.failures.append(error.code)

    def later(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)


class WorkerDesk:
    """A worker's side of a scripted store. Made on an event loop; ``close`` proves that nothing is held."""

    def __init__(self, *, use: StoreUse | None = None, **changes: object) -> None:
        self.use = use or StoreUse(transfer_deadline_s=2.0)
        self.source = PrefillBench()
        self.runner = make_runner(**changes)
        self.fabric = LocalFabric()
        layout, tail = self.runner.layout, self.runner.tail_layout
        self.store = ScriptedStore(self.fabric, layout.page_bytes, tail.nbytes)
        self.link = ScriptedLink(self.store)
        transfer = LocalTransfer(self.fabric, "worker-0")
        for region in self.runner.regions():
            transfer.register(region)
        self.transfers = TransferThread(transfer, clock=SystemClock())
        self.transfers.start()
        self.registry = CollectorRegistry()
        self.metrics = StoreMetrics(self.registry)
        self.offloader = Offloader(
            self.runner,
            self.link,  # type: ignore[arg-type]
            self.use,
            worker="worker-0",
            incarnation="1",
            running=False,
            on_call=self.transfers.wake,
            metrics=self.metrics,
        )
        self.preparer = Preparer(
            self.runner,
            self.transfers,
            self.link,  # type: ignore[arg-type]
            self.use,
            self.offloader,
            speeds=SpeedMeter(self.runner.clock),
            metrics=self.metrics,
        )

    def request(self, tokens: Any, *, exact: bool = False) -> RunningRequest:
        """A prompt that waits."""
        job = PrefillJob("r", token_ids(tokens), TENANT, exact)
        return self.source.worker.new_task(job).request

    def count(self, name: str, **labels: str) -> float:
        """A counter's value."""
        return self.registry.get_sample_value(f"epdserve_engine_{name}_total", labels) or 0.0

    def lost(self) -> ServiceError:
        return WorkerLost("gone", worker="store-0")

    async def close(self) -> None:
        """Stop; every page and slot must be free, or set apart until its transfer is over."""
        await self.preparer.stop()
        await self.offloader.stop()
        await self.link.close()
        assert self.runner.leaked_pages() == 0
        await asyncio.to_thread(self.transfers.stop, timeout_s=5.0)
        assert self.runner.blocks.counts().quarantined == 0
        assert self.runner.staging_slots.counts().quarantined == 0
        self.source.end_leases()
        self.source.assert_nothing_leaked()
