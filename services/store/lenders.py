"""Who lends blocks on another machine, a store or a worker, as one: batches of places, and one verdict at the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, Protocol

from epdserve.services.errors import ServiceError
from epdserve.services.rpc.client import WorkerClient
from epdserve.services.rpc.pages import LentPages, lend_blocks, return_blocks
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store_types import BLOCKS, FetchRequest
from epdserve.services.types import BlockRef

PAGES: Final = "pages"  # region of a worker's blocks, the same on every worker


class Lender(Protocol):
    """One loan. ``region`` is where the places are."""

    @property
    def region(self) -> str:
        """Of the lender's memory."""

    def batches(self, wish: FetchRequest) -> AsyncGenerator[tuple[BlockRef, ...], None]:
        """What is lent, in order of the chain.

        Raises:
            ServiceError: It does not answer, or not any more.
        """

    async def end(self) -> bool:
        """The reads are over; whether the loan held until now. True where nothing was lent."""


class StoreLender:
    """Blocks of another machine's store, which reads its disks for it."""

    region = BLOCKS

    def __init__(self, store: StoreClient, *, deadline_s: float) -> None:
        self._store, self._deadline_s = store, deadline_s
        self._lease: tuple[str, str] | None = None

    async def batches(self, wish: FetchRequest) -> AsyncGenerator[tuple[BlockRef, ...], None]:
        """See ``Lender.batches``."""
        async with aclosing(self._store.fetch(wish, deadline_s=self._deadline_s)) as batches:
            async for batch in batches:
                self._lease = batch.lease, batch.incarnation
                yield tuple(block.ref for block in batch.blocks)

    async def end(self) -> bool:
        """See ``Lender.end``."""
        if self._lease is None:
            return True
        lease, incarnation = self._lease
        try:
            return await self._store.end_fetch(lease, incarnation=incarnation, deadline_s=self._deadline_s)
        except ServiceError:
            return False


class PagesLender:
    """Blocks in the pages of another machine's worker."""

    region = PAGES

    def __init__(self, worker: WorkerClient, *, deadline_s: float) -> None:
        self._worker, self._deadline_s = worker, deadline_s
        self._lent: LentPages | None = None

    async def batches(self, wish: FetchRequest) -> AsyncGenerator[tuple[BlockRef, ...], None]:
        """See ``Lender.batches``; all in one batch."""
        lent = await lend_blocks(self._worker, wish.hashes, exact=wish.exact, deadline_s=self._deadline_s)
        if lent.blocks:
            self._lent = lent
            yield lent.blocks

    async def end(self) -> bool:
        """See ``Lender.end``."""
        if self._lent is None:
            return True
        try:
            return await return_blocks(self._worker, self._lent, deadline_s=self._deadline_s)
        except ServiceError:
            return False
