"""Blocks of a chain from the machine's store into this worker's pages: reserve, read, verify, seal.

Bytes count only if each block's header and checksum are the promised ones and the lease held until after the reads, as
in a hand-off. Destinations of a read that is not over are quarantined. Runs on the event loop; the transfer and the
checksums have threads of their own.
"""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.blocks import Seal
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.types import BlockHash, PageId
from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.runner import PAGES, Runner
from epdserve.services.engine.speeds import SpeedMeter
from epdserve.services.engine.store_link import Store, StoreLink
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.engine.transfer_thread import PendingRead, ReadOutcome, TransferThread
from epdserve.services.engine.verifying import wrong_blocks
from epdserve.services.errors import ServiceError
from epdserve.services.store_types import (
    BLOCKS,
    CacheOwner,
    CacheTier,
    FetchBatch,
    FetchedBlock,
    FetchRequest,
)

log = logging.getLogger(__name__)

_LEAST_PAGES: Final = 8  # left for those that run


@dataclass(frozen=True, slots=True)
class Wish:
    """Blocks of a chain to bring up.

    Attributes:
        hashes: They follow one another; ``parent`` is the one before the first.
        max_wait_s: How long the store may take for a portion.
    """

    owner: CacheOwner
    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    exact: bool
    max_wait_s: float


@dataclass(slots=True, eq=False)
class _Arrival:
    """Lent blocks and the pages that they are read into."""

    blocks: tuple[FetchedBlock, ...]
    pages: list[PageId]
    read: PendingRead | None = None
    verdict: asyncio.Future[list[int]] | None = None


class BlockFetcher:
    """Brings blocks up, portion by portion. Owned by the event loop."""

    def __init__(
        self,
        runner: Runner,
        transfers: TransferThread,
        link: StoreLink,
        use: StoreUse,
        *,
        speeds: SpeedMeter,
        metrics: StoreMetrics,
    ) -> None:
        self._runner, self._transfers, self._link, self._use = runner, transfers, link, use
        self._speeds, self._metrics = speeds, metrics
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify-fetch")

    def close(self) -> None:
        """End the thread that verifies."""
        self._verifier.shutdown(wait=False)

    async def fetch(self, store: Store, wish: Wish, pages: list[PageId]) -> list[CacheTier]:
        """Bring blocks up from the first on, as far as they can be had.

        Args:
            store: To ask.
            wish: What for.
            pages: The pages of what has come are appended as they are sealed, each referenced once: the caller
                releases them, also if this is cancelled.

        Returns:
            The tier of each block that has come.
        """
        tiers: list[CacheTier] = []
        while len(tiers) < len(wish.hashes):
            start = len(tiers)
            hashes = wish.hashes[start : start + self._use.portion_blocks]
            parent = wish.hashes[start - 1] if start else wish.parent
            part = Wish(wish.owner, hashes, parent, wish.exact, wish.max_wait_s)
            came = await _Portion(self, self._runner, store, part).bring(pages)
            tiers += came
            if len(came) < len(hashes):
                break
        for tier in tiers:
            self._metrics.fetched_blocks.labels(tier=tier.value).inc()
        return tiers

    # -- what a portion needs -------------------------------------------------------------------------------

    async def lend(self, store: Store, wish: Wish, portion: "_Portion") -> None:
        """Ask for a portion and read each batch while the next one is brought up there."""
        endpoint = await self._link.endpoint(store, deadline_s=self._use.call_deadline_s)
        request = FetchRequest(
            owner=wish.owner,
            hashes=wish.hashes,
            parent=wish.parent,
            exact=wish.exact,
            max_blocks=len(wish.hashes),
            max_wait_s=wish.max_wait_s,
        )
        deadline_s = self._use.transfer_deadline_s
        page_bytes = self._runner.layout.page_bytes
        loop = asyncio.get_running_loop()
        async with aclosing(store.client.fetch(request, deadline_s=deadline_s)) as batches:
            async for batch in batches:
                arrival = portion.take(batch)
                copies = [
                    Copy(BLOCKS, block.ref.page, PAGES, page, page_bytes)
                    for block, page in zip(arrival.blocks, arrival.pages, strict=True)
                ]
                arrival.read = self._transfers.read(endpoint, copies, deadline_s=deadline_s)
                arrival.verdict = loop.create_task(self._verified(arrival), name="verify-fetch")

    async def end(self, store: Store, portion: "_Portion", suspects: tuple[bytes, ...]) -> bool:
        """End the lease; whether it held."""
        return await store.client.end_fetch(
            portion.lease,
            incarnation=portion.incarnation,
            suspects=suspects,
            deadline_s=self._use.call_deadline_s,
        )

    def end_later(self, store: Store, portion: "_Portion") -> None:
        """End the lease of a portion that nobody waits for."""
        self._link.later(self.end(store, portion, ()))

    def failed(self, store: Store, error: ServiceError) -> None:
        """A call went wrong."""
        self._link.failed(store, error)

    def ended(self, outcome: str, came: list[CacheTier], seconds: float) -> None:
        """Count a portion; its speed counts for the tier of its last block, the slowest one."""
        self._metrics.fetches.labels(outcome=outcome).inc()
        if came:
            self._speeds.fetched(came[-1].value, len(came) * self._runner.layout.page_bytes, seconds)

    def give_up(self, arrival: _Arrival) -> None:
        """Free pages that hold nothing; those that a transfer may still write into are set apart first."""
        blocks, pages, read = self._runner.blocks, arrival.pages, arrival.read
        if arrival.verdict is not None:
            arrival.verdict.cancel()
        if read is None or read.over:
            blocks.abort(pages)
            return
        blocks.quarantine(pages)
        if self._transfers.settle(read, lambda: blocks.transfer_over(pages)):
            blocks.transfer_over(pages)

    def now(self) -> float:
        """Seconds."""
        return self._runner.clock.monotonic()

    async def _verified(self, arrival: _Arrival) -> list[int]:
        """Places of the blocks that are not what was promised; all of them if the read did not end well."""
        assert arrival.read is not None
        outcome = await asyncio.wrap_future(arrival.read.future)
        if outcome is not ReadOutcome.DONE:
            return list(range(len(arrival.pages)))
        refs = [block.ref for block in arrival.blocks]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._verifier, wrong_blocks, self._runner, arrival.pages, refs)


class _Portion:
    """Blocks under one lease. Whatever happens, their pages end sealed, free or in quarantine."""

    def __init__(self, fetcher: BlockFetcher, runner: Runner, store: Store, wish: Wish) -> None:
        self._fetcher, self._runner, self._store, self._wish = fetcher, runner, store, wish
        self._reserved: list[PageId] = []
        self._arrivals: list[_Arrival] = []
        self.lease, self.incarnation = "", ""

    async def bring(self, pages: list[PageId]) -> list[CacheTier]:
        """Bring the portion up; tiers of what came, in order from the first block on."""
        if not self._reserve():
            self._fetcher.ended("no_room", [], 0.0)
            return []
        began, came = self._fetcher.now(), list[CacheTier]()
        outcome = "cancelled"
        ended = False
        try:
            try:
                await self._fetcher.lend(self._store, self._wish, self)
            except ServiceError as error:  # what came before is still lent
                self._fetcher.failed(self._store, error)
            sound, outcome, suspects = await self._judge()
            if self.lease:
                ended = True
                if not await self._fetcher.end(self._store, self, suspects):
                    sound, outcome = 0, "lease_lost"
            came = self._seal(sound, pages)
        except ServiceError as error:
            outcome = "failed"
            self._fetcher.failed(self._store, error)
        finally:
            if self.lease and not ended:
                self._fetcher.end_later(self._store, self)
            for arrival in self._arrivals:
                self._fetcher.give_up(arrival)
            self._runner.blocks.abort(self._reserved)
            self._fetcher.ended(outcome, came, self._fetcher.now() - began)
        return came

    def take(self, batch: FetchBatch) -> _Arrival:
        """Give lent blocks their pages."""
        self.lease, self.incarnation = batch.lease, batch.incarnation
        wanted = self._wish.hashes[self._placed() :]
        blocks = batch.blocks[: len(self._reserved)]
        for count, (block, block_hash) in enumerate(zip(blocks, wanted, strict=False)):
            if block.ref.block_hash != block_hash:  # not what was asked for: nothing after it is of use
                blocks = blocks[:count]
                break
        arrival = _Arrival(blocks, [self._reserved.pop() for _ in blocks])
        self._arrivals.append(arrival)
        return arrival

    def _reserve(self) -> bool:
        count = len(self._wish.hashes)
        if self._runner.blocks.available() < count + _LEAST_PAGES:
            return False
        try:
            self._reserved = self._runner.blocks.reserve(count)
        except OutOfPages:
            return False
        return True

    def _placed(self) -> int:
        return sum(len(arrival.pages) for arrival in self._arrivals)

    async def _judge(self) -> tuple[int, str, tuple[bytes, ...]]:
        """How many blocks from the first on are right, what to call it, and those that are wrong."""
        sound, broken, suspects, outcome = 0, False, list[bytes](), "done" if self._arrivals else "miss"
        for arrival in self._arrivals:
            assert arrival.verdict is not None
            assert arrival.read is not None
            wrong = await arrival.verdict
            if arrival.read.future.result() is not ReadOutcome.DONE:
                outcome = arrival.read.future.result().value
            elif wrong:
                suspects += [arrival.blocks[place].ref.block_hash for place in wrong]
                outcome = "corrupt"
            if not broken:
                sound += wrong[0] if wrong else len(arrival.pages)
            broken = broken or bool(wrong)
        return sound, outcome, tuple(suspects)

    def _seal(self, sound: int, pages: list[PageId]) -> list[CacheTier]:
        tiers: list[CacheTier] = []
        parent = self._wish.parent
        for arrival in self._arrivals:
            count = min(sound - len(tiers), len(arrival.pages))
            if count <= 0:
                break
            seals = [
                Seal(page, BlockHash(block.ref.block_hash), block.ref.checksum, block.ref.exact)
                for block, page in zip(arrival.blocks[:count], arrival.pages, strict=False)
            ]
            pages += self._runner.blocks.seal_chain(seals, parent=parent)
            tiers += [block.tier for block in arrival.blocks[:count]]
            parent, arrival.pages = seals[-1].block_hash, arrival.pages[count:]
        return tiers
