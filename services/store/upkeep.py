"""What a store does by the clock: ends leases and tails, tells the directory again what it lost."""

from __future__ import annotations

import asyncio
import logging

from epdserve.services.engine.peer_book import PeerBook
from epdserve.services.pool.view import ClusterView
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.memory import StoreMemory
from epdserve.services.store.tail_notices import TailNotices
from epdserve.services.store.tasks import end

log = logging.getLogger(__name__)

TICK_S = 0.1
TOLD_AT_ONCE = 256  # tails of a regular round: 50 calls a second by default


class Upkeep:
    """Owned by one event loop.

    The directory is told everything again when the registry's data was lost and when it answers after a silence, and
    some of it every ``republish_s`` in any case: a hint may have been lost alone.
    """

    def __init__(
        self,
        memory: StoreMemory,
        notices: TailNotices,
        book: PeerBook,
        view: ClusterView,
        settings: StoreSettings,
    ) -> None:
        self._memory, self._notices, self._book, self._view = memory, notices, book, view
        self._republish_s = settings.republish_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._expire(), name="upkeep"),
            loop.create_task(self._tell(), name="tell-tails"),
        ]

    async def stop(self) -> None:
        """End."""
        await end(self._tasks)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._memory.leases.expire()
            self._memory.tails.expire()
            await self._book.forget_absent()

    async def _tell(self) -> None:
        loop = asyncio.get_running_loop()
        epoch, connected, next_at = self._view.epoch, True, loop.time() + self._republish_s
        while True:
            await asyncio.sleep(TICK_S)
            now_connected = self._view.connected
            lost = self._view.epoch != epoch or (now_connected and not connected)
            epoch, connected = self._view.epoch, now_connected
            if now_connected and (lost or loop.time() >= next_at):
                told = await self._notices.tell_again(None if lost else TOLD_AT_ONCE)
                next_at = loop.time() + self._republish_s
                log.debug("tails told again", extra={"tails": told, "lost": lost})
