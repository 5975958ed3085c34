"""Chains that workers want to read: found in memory, on disk or at a neighbour, and lent batch by batch.

While a reader reads one batch the next is brought up. What brings a batch up is a task that always runs to its end:
a caller that goes away leaves no slot behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.lending_cache import Filled
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import BlockHash, BlockOwner, LeaseId
from epdserve.services.errors import Overloaded
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.loans import Loan
from epdserve.services.store.memory import StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.peer_blocks import PeerBlocks, Step
from epdserve.services.store.saver import Saver
from epdserve.services.store.tasks import Tasks
from epdserve.services.store_types import CacheTier, FetchBatch, FetchedBlock, FetchRequest, TierRun
from epdserve.services.types import BlockRef


@dataclass(slots=True, eq=False)
class _Fetch:
    request: FetchRequest
    hashes: list[BlockHash]
    ends_at: float
    end: str = ""  # why it ended


@dataclass(frozen=True, slots=True)
class _Brought:
    blocks: list[PinnedBlock]
    tier: CacheTier
    reason: str = "missing"  # why there are none


class Fetches:
    """Owned by one event loop.

    Args:
        executor: Waits for disks and verifies.
        incarnation: Of this store, in batches.
        on_lent: Called when a lease was granted: peers may read from now on.
    """

    def __init__(
        self,
        memory: StoreMemory,
        saver: Saver,
        executor: Executor,
        settings: StoreSettings,
        metrics: StoreMetrics,
        clock: Clock,
        *,
        incarnation: str,
        peers: PeerBlocks | None,
    ) -> None:
        self._memory, self._saver, self._executor = memory, saver, executor
        self._settings, self._metrics, self._clock = settings, metrics, clock
        self._incarnation, self._peers = incarnation, peers
        self._loading: dict[BlockHash, asyncio.Task[_Brought]] = {}
        self._tasks = Tasks()
        self.running = 0

    def locate(self, hashes: Sequence[BlockHash], *, exact: bool, local_only: bool) -> tuple[TierRun, ...]:
        """How far a chain is held, and where."""
        held = self._memory.cache.held(hashes, exact=exact)
        tier = self._memory.tier
        stored = [False] * len(hashes) if tier is None else tier.stored(hashes, exact=exact)
        runs: list[TierRun] = []
        length = 0
        for here, there in zip(held, stored, strict=True):
            if not (here or there):
                break
            where = CacheTier.HOST if here else CacheTier.SSD
            length += 1
            if runs and runs[-1].tier is where:
                runs[-1] = TierRun(where, runs[-1].blocks + 1)
            else:
                runs.append(TierRun(where, 1))
        if self._peers is not None and not local_only and length < len(hashes):
            known = self._peers.known(hashes[length:])
            if known:
                runs.append(TierRun(CacheTier.PEER, known))
        return tuple(runs)

    async def run(
        self, request: FetchRequest, *, deadline_s: float | None
    ) -> AsyncGenerator[FetchBatch, None]:
        """See ``StoreHandler.fetch``.

        Raises:
            Overloaded: Too many fetches are under way.
        """
        if self.running >= self._settings.max_fetches:
            self._metrics.refused_calls.labels(call="fetch").inc()
            raise Overloaded(f"{self.running} fetches are under way", retry_after_s=0.1)
        self.running += 1
        began = self._clock.monotonic()
        loan = Loan(self._memory.cache)
        # the reader reads the last batch after the call
        lease = self._memory.leases.grant(self._settings.lease_ttl_s + (deadline_s or 0.0), loan.end)
        fetch = self._fetch(request, began, deadline_s)
        lent = 0
        try:
            async for blocks in self._batches(fetch, loan):
                lent += len(blocks)
                yield FetchBatch(str(lease), self._incarnation, tuple(blocks))
        except BaseException:  # the caller has gone, or we have a bug: nobody will read
            fetch.end, lent = fetch.end or "cancelled", 0
            raise
        finally:
            self.running -= 1
            if not lent:
                self._memory.leases.end(LeaseId(lease))
            self._metrics.fetches.labels(reason=fetch.end or "cancelled").inc()
            self._metrics.seconds.labels(call="fetch").observe(self._clock.monotonic() - began)

    async def stop(self) -> None:
        """Wait for what is being brought up."""
        await self._tasks.wait(4 * self._settings.peer_deadline_s)

    def _fetch(self, request: FetchRequest, began: float, deadline_s: float | None) -> _Fetch:
        limit = request.max_blocks or len(request.hashes)
        hashes = [BlockHash(block_hash) for block_hash in request.hashes[:limit]]
        # what there is before the deadline is worth more than an error at it
        waits = [wait for wait in (request.max_wait_s, 0.9 * (deadline_s or 0.0)) if wait > 0]
        return _Fetch(request, hashes, began + min(waits) if waits else float("inf"))

    async def _batches(self, fetch: _Fetch, loan: Loan) -> AsyncGenerator[list[FetchedBlock], None]:
        """Blocks of the chain as they come, added to the loan; says in ``fetch.end`` why they end."""
        done = 0
        while done < len(fetch.hashes):
            parent = fetch.hashes[done - 1] if done else _hash_or_none(fetch.request.parent)
            step = (fetch.hashes[done : done + self._settings.batch_blocks], parent)
            brought = await self._next(fetch, step)
            if brought is None:
                fetch.end = "time"
                return
            if not brought.blocks:
                fetch.end = brought.reason
                return
            described = [_describe(block, brought.tier) for block in brought.blocks]
            if not loan.add(brought.blocks):
                fetch.end = "lease"
                return
            done += len(described)
            self._metrics.fetched.labels(tier=brought.tier.value).inc(len(described))
            yield described
        fetch.end = "complete"

    async def _next(self, fetch: _Fetch, step: Step) -> _Brought | None:
        """The next blocks, None when the time is over. What comes too late is let go."""
        left_s = fetch.ends_at - self._clock.monotonic()
        task = self._tasks.start(self._bring(fetch.request, step), "bring")
        try:
            async with asyncio.timeout(None if left_s == float("inf") else max(left_s, 0.0)):
                return await asyncio.shield(task)
        except BaseException as error:
            task.add_done_callback(self._let_go)
            if isinstance(error, TimeoutError):
                return None
            raise

    def _let_go(self, task: asyncio.Task[_Brought]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._memory.cache.release(task.result().blocks)

    async def _bring(self, request: FetchRequest, step: Step) -> _Brought:
        """As many blocks from the beginning of ``step`` as one tier has, pinned."""
        hashes, parent = step
        while True:
            if pinned := self._held(hashes, request):
                return _Brought(pinned, CacheTier.HOST)
            other = self._loading.get(hashes[0])
            if other is None:
                break
            await asyncio.wait([other])  # who wants the same waits instead of bringing it again
        later = self._memory.cache.held(hashes[1:], exact=request.exact)
        run = hashes[: 1 + later.index(True)] if True in later else hashes
        # counts the misses
        self._memory.cache.release(self._memory.cache.match(run, exact=request.exact))
        current = asyncio.current_task()
        assert current is not None, "a coroutine runs in a task"
        mine = [block_hash for block_hash in run if block_hash not in self._loading]
        self._loading.update(dict.fromkeys(mine, current))
        try:
            return await self._from_below((run, parent), request)
        finally:
            for block_hash in mine:
                del self._loading[block_hash]

    def _held(self, hashes: Sequence[BlockHash], request: FetchRequest) -> list[PinnedBlock]:
        """What memory holds of a chain, pinned and used, on disk as well."""
        held = self._memory.cache.held(hashes, exact=request.exact)
        here = held.index(False) if False in held else len(held)
        if not here:
            return []
        pinned = self._memory.cache.match(hashes[:here], exact=request.exact)
        if self._memory.tier is not None:
            self._memory.tier.touch([block.header.block_hash for block in pinned])
        return pinned

    async def _from_below(self, step: Step, request: FetchRequest) -> _Brought:
        hashes, parent = step
        tier = self._memory.tier
        stored = 0 if tier is None else tier.longest_prefix(hashes, exact=request.exact)
        if stored:
            brought = await self._from_disk((hashes[:stored], parent), request)
            if brought.blocks or brought.reason == "no_room":
                return brought
        if self._peers is None or request.local_only:
            return _Brought([], CacheTier.PEER)
        pinned = await self._peers.bring(step, request.owner, exact=request.exact)
        if self._settings.keep_pulled and pinned:
            self._saver.save(self._pin_again(pinned), running=False)
        return _Brought(pinned, CacheTier.PEER)

    async def _from_disk(self, step: Step, request: FetchRequest) -> _Brought:
        hashes, parent = step
        slots: list[Slot] = []
        while len(slots) < len(hashes) and (slot := self._memory.cache.reserve()) is not None:
            slots.append(slot)
        if not slots:
            return _Brought([], CacheTier.SSD, "no_room")
        work = (list(hashes[: len(slots)]), parent, slots, request)
        pinned = await asyncio.get_running_loop().run_in_executor(self._executor, self._read_disk, *work)
        return _Brought(pinned, CacheTier.SSD)

    def _read_disk(
        self,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        slots: list[Slot],
        request: FetchRequest,
    ) -> list[PinnedBlock]:
        """In a thread: read, and pin what is whole up to the first miss. The tier verifies every byte."""
        cache, tier = self._memory.cache, self._memory.tier
        assert tier is not None, "only a tier has said that it holds these"
        filled: list[Filled] = []
        try:
            headers = tier.get_batch(hashes, [self._memory.block_slots.bytes_of(slot) for slot in slots])
            for slot, header in zip(slots, headers, strict=True):
                if header is None or (request.exact and not header.exact):
                    break
                filled.append(Filled(slot, header, filled[-1].header.block_hash if filled else parent))
        finally:
            for slot in slots[len(filled) :]:
                cache.abort(slot)
        owner = BlockOwner(request.owner.tenant, request.owner.root)
        return [block for block in cache.seal_pinned(filled, owner=owner) if block is not None]

    def _pin_again(self, pinned: Sequence[PinnedBlock]) -> list[PinnedBlock]:
        found = (self._memory.cache.get(block.header.block_hash) for block in pinned)
        return [block for block in found if block is not None]


def _describe(block: PinnedBlock, tier: CacheTier) -> FetchedBlock:
    header, slot = block.header, block.slot
    ref = BlockRef(slot.index, slot.generation, header.block_hash, header.checksum, header.exact)
    return FetchedBlock(ref, tier)


def _hash_or_none(parent: bytes | None) -> BlockHash | None:
    return None if parent is None else BlockHash(parent)
