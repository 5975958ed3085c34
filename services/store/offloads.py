"""Blocks that workers offer: read from their pages, verified, kept in memory, handed on to the disks.

Bounded by ``max_offload_blocks`` being read at a time; what comes beyond it is refused at once, so a worker never
waits for room. An offer is one task that runs to its end within its deadline, also when its caller goes away.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor

from epdserve.kvstore.block_header import BlockHeader
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.lending_cache import Filled
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import BlockHash, BlockOwner, Endpoint
from epdserve.services.engine.peer_book import PeerBook
from epdserve.services.engine.transfer_thread import ReadOutcome
from epdserve.services.errors import InvalidRequest
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.deletions import Deletions
from epdserve.services.store.lenders import PAGES
from epdserve.services.store.memory import CHECKSUM, StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.pulls import Puller
from epdserve.services.store.saver import Saver
from epdserve.services.store.tasks import Tasks
from epdserve.services.store_types import BLOCKS, OffloadBlock, OffloadRequest, OffloadResult


class Offloads:
    """Owned by one event loop."""

    def __init__(
        self,
        memory: StoreMemory,
        saver: Saver,
        book: PeerBook,
        puller: Puller,
        executor: Executor,
        settings: StoreSettings,
        metrics: StoreMetrics,
        clock: Clock,
        deletions: Deletions,
    ) -> None:
        self._deletions = deletions
        self._memory, self._saver, self._book, self._puller = memory, saver, book, puller
        self._executor, self._settings, self._metrics, self._clock = executor, settings, metrics, clock
        self._tasks = Tasks()
        self.in_flight = 0  # blocks

    async def run(self, request: OffloadRequest, *, deadline_s: float | None) -> tuple[OffloadResult, ...]:
        """See ``StoreHandler.offload``.

        Raises:
            WorkerLost: No such life of the worker is known, or it does not answer.
            InvalidRequest: A block is offered twice.
        """
        if len({block.ref.block_hash for block in request.blocks}) < len(request.blocks):
            raise InvalidRequest("a block is offered twice", param="blocks")
        limit_s = self._settings.offload_deadline_s
        limit_s = limit_s if deadline_s is None else min(limit_s, deadline_s)
        return await self._tasks.run(self._take(request, self._clock.monotonic() + limit_s), "offload")

    async def stop(self) -> None:
        """Wait for what is being read; each has its deadline."""
        await self._tasks.wait(2 * self._settings.offload_deadline_s)

    async def _take(self, request: OffloadRequest, ends_at: float) -> tuple[OffloadResult, ...]:
        began = self._clock.monotonic()
        results = dict.fromkeys((block.ref.block_hash for block in request.blocks), OffloadResult.REFUSED)
        why: Counter[str] = Counter()
        wanted = self._not_held(request.blocks, results)
        why["held"] = len(request.blocks) - len(wanted)
        room = max(0, self._settings.max_offload_blocks - self.in_flight)
        why["busy"] = len(wanted) - len(wanted[:room])
        wanted = wanted[:room]
        self.in_flight += len(wanted)
        try:
            if wanted:
                taken = await self._read(request, wanted, ends_at, why)
                if self._deletions.since(request.owner, began):
                    taken = self._undo(taken)
                results |= dict.fromkeys((block.header.block_hash for block in taken), OffloadResult.TAKEN)
                self._saver.save(taken, running=request.running)
        finally:
            self.in_flight -= len(wanted)
            for reason, blocks in why.items():
                if blocks:
                    self._metrics.offloaded.labels(result=reason).inc(blocks)
        self._metrics.seconds.labels(call="offload").observe(self._clock.monotonic() - began)
        return tuple(results[block.ref.block_hash] for block in request.blocks)

    def _undo(self, taken: Sequence[PinnedBlock]) -> list[PinnedBlock]:
        """Let go of what arrived after a deletion of its owner's blocks that it was on its way at."""
        self._memory.cache.delete([block.header.block_hash for block in taken])
        self._memory.cache.release(taken)
        return []

    def _not_held(
        self, blocks: Sequence[OffloadBlock], results: dict[bytes, OffloadResult]
    ) -> list[OffloadBlock]:
        """What has to be read; notes the others as held, and used now."""
        cache, tier = self._memory.cache, self._memory.tier
        hashes = [BlockHash(block.ref.block_hash) for block in blocks]
        good, any_kind = cache.held(hashes, exact=True), cache.held(hashes)
        if tier is not None:
            stored = zip(tier.stored(hashes, exact=True), tier.stored(hashes), strict=True)
            good_there, any_there = zip(*stored, strict=True) if hashes else ((), ())
            good = [here or there for here, there in zip(good, good_there, strict=True)]
            any_kind = [here or there for here, there in zip(any_kind, any_there, strict=True)]
            tier.touch(hashes)
        wanted = []
        for block, exact, held in zip(blocks, good, any_kind, strict=True):
            if exact or (held and not block.ref.exact):
                results[block.ref.block_hash] = OffloadResult.HELD
            else:
                wanted.append(block)
        self._save_held(hashes, results)
        return wanted

    def _save_held(self, hashes: Sequence[BlockHash], results: dict[bytes, OffloadResult]) -> None:
        """Blocks that are in memory and did not make it to the disks get another chance."""
        if self._memory.tier is None:
            return
        held = [block_hash for block_hash in hashes if results[block_hash] is OffloadResult.HELD]
        missing = [
            block_hash
            for block_hash, there in zip(held, self._memory.tier.stored(held, exact=True), strict=True)
            if not there
        ]
        pinned = [block for block_hash in missing if (block := self._memory.cache.get(block_hash))]
        self._saver.save(pinned, running=False)

    async def _read(
        self,
        request: OffloadRequest,
        wanted: Sequence[OffloadBlock],
        ends_at: float,
        why: Counter[str],
    ) -> list[PinnedBlock]:
        """Blocks that are here and whole now, pinned; counts what became of all of them."""
        left_s = max(0.0, ends_at - self._clock.monotonic())
        why["unread"] = len(wanted)  # should it not be known
        endpoint = await self._book.endpoint(
            request.worker, incarnation=request.incarnation, deadline_s=left_s
        )
        why["unread"] = 0
        fitting = [block for block in wanted if _fits(endpoint, block, self._memory.geometry.page_bytes)]
        why["misfit"] += len(wanted) - len(fitting)
        slots: list[Slot] = []
        while len(slots) < len(fitting) and (slot := self._memory.cache.reserve()) is not None:
            slots.append(slot)
        why["no_room"] += len(fitting) - len(slots)
        blocks = fitting[: len(slots)]
        if not blocks:
            return []
        outcome = await self._puller.fill(
            endpoint,
            PAGES,
            [block.ref.page for block in blocks],
            slots,
            into=BLOCKS,
            owner=self._memory.cache,
            nbytes=self._memory.geometry.page_bytes,
            deadline_s=max(0.0, ends_at - self._clock.monotonic()),
        )
        if outcome is not ReadOutcome.DONE:
            why["late" if outcome is ReadOutcome.LATE else "unread"] += len(blocks)
            return []
        sealed = await self._seal(request, blocks, slots)
        taken = [block for block in sealed if block is not None]
        why["taken"] += len(taken)
        why["corrupt"] += len(sealed) - len(taken)
        return taken

    async def _seal(
        self, request: OffloadRequest, blocks: Sequence[OffloadBlock], slots: Sequence[Slot]
    ) -> list[PinnedBlock | None]:
        filled = [
            Filled(slot, self._header(block), None if block.parent is None else BlockHash(block.parent))
            for slot, block in zip(slots, blocks, strict=True)
        ]
        owner = BlockOwner(request.owner.tenant, request.owner.root)
        return await asyncio.get_running_loop().run_in_executor(
            self._executor,
            lambda: self._memory.cache.seal_pinned(filled, owner=owner, checksum=CHECKSUM),
        )

    def _header(self, block: OffloadBlock) -> BlockHeader:
        ref = block.ref
        return BlockHeader(
            BlockHash(ref.block_hash), ref.checksum, self._memory.geometry.payload_bytes, ref.exact
        )


def _fits(endpoint: Endpoint, block: OffloadBlock, page_bytes: int) -> bool:
    """Whether the worker has such a page; one bad reference must not spoil the whole transfer."""
    return any(
        region.name == PAGES and block.ref.page < region.count and region.stride == page_bytes
        for region in endpoint.regions
    )
