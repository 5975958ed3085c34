"""Blocks that another machine holds, in its store or in a worker's pages, brought into this one's memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace

from epdserve.kvstore.block_header import BlockHeader
from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.lending_cache import Filled
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import BlockHash, BlockOwner, Endpoint
from epdserve.services.engine.peer_book import PeerBook
from epdserve.services.engine.transfer_thread import ReadOutcome
from epdserve.services.errors import ServiceError
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store.deletions import Deletions
from epdserve.services.store.lenders import Lender, PagesLender, StoreLender
from epdserve.services.store.memory import CHECKSUM, StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.neighbours import Holder, Neighbours
from epdserve.services.store.pulls import Puller
from epdserve.services.store_types import BLOCKS, CacheOwner, FetchRequest
from epdserve.services.types import BlockRef

log = logging.getLogger(__name__)

ASKED_AT_MOST = 2  # neighbours for one batch; then it is quicker to compute

Step = tuple[Sequence[BlockHash], BlockHash | None]  # blocks, and the one before them


class PeerBlocks:
    """Owned by one event loop. A batch is used only if the peer's lease held until it had been read."""

    def __init__(
        self,
        memory: StoreMemory,
        neighbours: Neighbours,
        book: PeerBook,
        puller: Puller,
        executor: Executor,
        metrics: StoreMetrics,
        deletions: Deletions,
        *,
        deadline_s: float,
    ) -> None:
        self._memory, self._neighbours, self._book, self._puller = memory, neighbours, book, puller
        self._executor, self._metrics, self._deadline_s = executor, metrics, deadline_s
        self._deletions = deletions

    def known(self, hashes: Sequence[BlockHash]) -> int:
        """How many blocks of a chain some neighbour is said to hold."""
        return max((holder.blocks for holder in self._neighbours.holders(hashes)), default=0)

    async def bring(self, step: Step, owner: CacheOwner, *, exact: bool) -> list[PinnedBlock]:
        """As many blocks of a chain as one neighbour gives, pinned; none is a miss. Not to be cancelled."""
        hashes, _ = step
        if self._deletions.recent(owner):
            return []
        for holder in self._neighbours.holders(hashes)[:ASKED_AT_MOST]:
            pinned = await self._from(holder, step, owner, exact=exact)
            if pinned:
                return pinned
        return []

    async def _from(self, holder: Holder, step: Step, owner: CacheOwner, *, exact: bool) -> list[PinnedBlock]:
        hashes, parent = step
        wish = FetchRequest(
            owner,
            tuple(hashes[: holder.blocks]),
            parent,
            exact=exact,
            local_only=True,
            max_wait_s=self._deadline_s / 2,
        )
        try:
            async with asyncio.timeout(self._deadline_s):
                client = await self._book.client(
                    holder.worker, incarnation=holder.incarnation, deadline_s=self._deadline_s
                )
                endpoint = await self._book.endpoint(
                    holder.worker, incarnation=holder.incarnation, deadline_s=self._deadline_s
                )
        except (ServiceError, TimeoutError):
            self._count("unreached", len(wish.hashes))
            return []
        lender = (
            StoreLender(client, deadline_s=self._deadline_s)
            if isinstance(client, StoreClient)
            else PagesLender(client, deadline_s=self._deadline_s)
        )
        return await self._pull(lender, endpoint, wish)

    async def _pull(self, lender: Lender, endpoint: Endpoint, wish: FetchRequest) -> list[PinnedBlock]:
        spare = self._reserve(len(wish.hashes))
        if not spare:
            self._count("no_room", len(wish.hashes))
            return []
        wish = replace(wish, hashes=wish.hashes[: len(spare)])
        filled: list[Filled] = []
        error = "missing"
        try:
            async with aclosing(lender.batches(wish)) as batches:
                async for refs in batches:
                    error = await self._read((lender.region, endpoint), wish, refs, spare, filled)
                    if error:
                        break
        except ServiceError:
            error = "unreached"
        _each(self._memory.cache.abort, spare)
        self._count(error or "missing", len(wish.hashes) - len(filled))
        if not await lender.end():
            _each(self._memory.cache.abort, [item.slot for item in filled])
            self._count("lease_lost", len(filled))
            return []
        return await self._seal(filled, wish.owner)

    def _reserve(self, count: int) -> list[Slot]:
        slots: list[Slot] = []
        while len(slots) < count and (slot := self._memory.cache.reserve()) is not None:
            slots.append(slot)
        return slots

    async def _read(
        self,
        source: tuple[str, Endpoint],
        wish: FetchRequest,
        refs: Sequence[BlockRef],
        spare: list[Slot],
        filled: list[Filled],
    ) -> str:
        """Read a batch into spare slots, which are then ``filled``; what went wrong, or nothing."""
        names = tuple(ref.block_hash for ref in refs)
        exact = not wish.exact or all(ref.exact for ref in refs)
        if names != wish.hashes[len(filled) : len(filled) + len(names)] or not exact:
            return "missing"  # not what was asked for
        region, endpoint = source
        slots = [spare.pop() for _ in names]
        outcome = await self._puller.fill(
            endpoint,
            region,
            [ref.page for ref in refs],
            slots,
            into=BLOCKS,
            owner=self._memory.cache,
            nbytes=self._memory.geometry.page_bytes,
            deadline_s=self._deadline_s,
        )
        if outcome is not ReadOutcome.DONE:
            return "late" if outcome is ReadOutcome.LATE else "unread"
        for slot, ref in zip(slots, refs, strict=True):
            parent = filled[-1].header.block_hash if filled else _hash_or_none(wish.parent)
            filled.append(Filled(slot, self._header(ref), parent))
        return ""

    async def _seal(self, filled: list[Filled], owner: CacheOwner) -> list[PinnedBlock]:
        if not filled:
            return []
        whose = BlockOwner(owner.tenant, owner.root)
        sealed = await asyncio.get_running_loop().run_in_executor(
            self._executor,
            lambda: self._memory.cache.seal_pinned(filled, owner=whose, checksum=CHECKSUM),
        )
        pinned: list[PinnedBlock] = []
        for block in sealed:
            if block is None:
                break
            pinned.append(block)
        self._memory.cache.release([block for block in sealed[len(pinned) :] if block is not None])
        self._count("done", len(pinned))
        self._count("corrupt", sealed.count(None))
        return pinned

    def _header(self, ref: BlockRef) -> BlockHeader:
        return BlockHeader(
            BlockHash(ref.block_hash), ref.checksum, self._memory.geometry.payload_bytes, ref.exact
        )

    def _count(self, outcome: str, blocks: int) -> None:
        if blocks:
            self._metrics.peer_blocks.labels(outcome=outcome).inc(blocks)


def _each(action: Callable[[Slot], None], slots: Sequence[Slot]) -> None:
    for slot in slots:
        action(slot)


def _hash_or_none(parent: bytes | None) -> BlockHash | None:
    return None if parent is None else BlockHash(parent)
