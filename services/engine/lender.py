"""Blocks in this worker's pages, lent to stores of other machines. Thread-safe but for ``start`` and ``stop``."""

import asyncio
from typing import Final

from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.types import BlockHash, LeaseId
from epdserve.services.rpc.pages import LentPages
from epdserve.services.types import BlockRef

LEASE_S: Final = 10.0  # for one batch to be read; a reader that died holds pages no longer than this
MOST_BLOCKS: Final = 64  # of one loan
MOST_LOANS: Final = 8  # at a time: what is lent cannot be evicted
_TICK_S: Final = 0.25


class PageLender:
    """Lends what is sealed or cached here, within bounds that leave the pages to the requests.

    Args:
        incarnation: Life of the worker.
    """

    def __init__(self, blocks: BlockManager, clock: Clock, incarnation: str) -> None:
        self._blocks, self._incarnation = blocks, incarnation
        self._leases = LeaseTable(clock)
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """Loans whose reader has not said that it is done."""
        return self._leases.counts().held

    def start(self) -> None:
        """Begin to collect loans whose time is over."""
        self._task = asyncio.get_running_loop().create_task(self._expire(), name="page-loans")

    async def stop(self) -> None:
        """End all loans."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._leases.end_all()

    def lend(self, hashes: tuple[bytes, ...], *, exact: bool) -> LentPages:
        """Lend the longest held part of a chain; nothing where too much is lent already."""
        wanted = [BlockHash(block_hash) for block_hash in hashes[:MOST_BLOCKS]]
        pages = [] if self.held >= MOST_LOANS else self._blocks.match(wanted, exact=exact)
        if not pages:
            return LentPages("", self._incarnation, ())
        lease = self._leases.grant(LEASE_S, lambda: self._blocks.release(pages))
        infos = self._blocks.describe_all(pages)
        return LentPages(str(lease), self._incarnation, tuple(BlockRef(*info) for info in infos))

    def end(self, lease: str, *, incarnation: str) -> bool:
        """End a loan; whether it still held."""
        return incarnation == self._incarnation and self._leases.end(LeaseId(lease))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._leases.expire()
