"""From memory to the SSD tier, behind everybody's back: batches of pinned blocks, written from where they lie.

Blocks wait here pinned, so that nothing is copied and nothing is evicted before it is written; their number is
bounded, and what comes beyond it stays in memory only. The tier's writes hold up one thread and nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.lending_cache import LendingCache
from epdserve.kvstore.ssd.tier import SsdTier
from epdserve.kvstore.ssd.write_behind import BlockPut
from epdserve.services.store.metrics import StoreMetrics

log = logging.getLogger(__name__)

BATCH_BLOCKS = 64


class Saver:
    """Owned by one event loop. Without a tier it only lets go of what it is given.

    Args:
        cache: Whose blocks these are.
        tier: Where they go.
        max_blocks: That wait or are being written.
    """

    def __init__(
        self, cache: LendingCache, tier: SsdTier | None, metrics: StoreMetrics, *, max_blocks: int
    ) -> None:
        self._cache, self._tier, self._metrics, self._max_blocks = cache, tier, metrics, max_blocks
        self._waiting: deque[tuple[PinnedBlock, bool]] = deque()
        self._writing = 0
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._turn = asyncio.Lock()  # held while a batch is written
        self._thread = ThreadPoolExecutor(1, "store-saver")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run(), name="saver")

    async def stop(self, *, drain_s: float) -> None:
        """Write what waits for up to ``drain_s``, let go of the rest."""
        try:
            async with asyncio.timeout(drain_s):
                await self._idle.wait()
        except TimeoutError:
            self._metrics.unsaved.labels(reason="failed").inc(len(self._waiting))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        async with self._turn:  # a batch in the thread goes on to its end
            self._cache.release([block for block, _ in self._waiting])
            self._waiting.clear()
        self._thread.shutdown(wait=False)

    @property
    def unsaved(self) -> int:
        """Blocks that wait or are being written."""
        return len(self._waiting) + self._writing

    def save(self, blocks: Sequence[PinnedBlock], *, running: bool) -> None:
        """Take over pinned blocks: they are written, if they have owners and are not stored yet, and let go."""
        if self._tier is None:
            self._cache.release(blocks)
            return
        hashes = [block.header.block_hash for block in blocks]
        stored, exact = self._tier.stored(hashes), self._tier.stored(hashes, exact=True)
        needless: list[PinnedBlock] = []
        for block, there, there_exact in zip(blocks, stored, exact, strict=True):
            if there_exact or (there and not block.header.exact) or block.owner is None:
                needless.append(block)
            elif self.unsaved >= self._max_blocks:
                self._metrics.unsaved.labels(reason="backlog").inc()
                needless.append(block)
            else:
                self._waiting.append((block, running))
                self._idle.clear()
        self._cache.release(needless)
        self._news.set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing is written meanwhile; what waits is dropped: for a deletion, which must be the last word."""
        async with self._turn:
            self._cache.release([block for block, _ in self._waiting])
            self._waiting.clear()
            yield

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await asyncio.shield(asyncio.create_task(self._write(), name="save"))
            self._idle.set()

    async def _write(self) -> None:
        async with self._turn:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_BLOCKS, len(self._waiting)))]
            if not batch:
                return  # dropped meanwhile
            self._writing = len(batch)
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._put, batch)
            finally:
                self._cache.release([block for block, _ in batch])
                self._writing = 0

    def _put(self, batch: Sequence[tuple[PinnedBlock, bool]]) -> None:
        assert self._tier is not None, "without a tier nothing waits"
        puts = [
            BlockPut(block.page, block.parent, block.owner.tenant, block.owner.root, running)
            for block, running in batch
            if block.owner is not None
        ]
        try:
            self._tier.put_batch(puts)
        except OSError as error:  # the tier takes care of its drives; this would be news
            self._metrics.unsaved.labels(reason="failed").inc(len(puts))
            log.warning("blocks not saved", extra={"blocks": len(puts), "error": str(error)})
