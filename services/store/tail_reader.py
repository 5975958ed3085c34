"""A tail from a peer's memory into a slot of the SWA pool: reserve, read, verify, keep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.tails import TailInfo
from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.transfer_thread import ReadOutcome
from epdserve.services.store.memory import CHECKSUM, StoreMemory
from epdserve.services.store.pulls import Puller
from epdserve.services.store_types import TAILS


class TailReader:
    """Owned by one event loop."""

    def __init__(self, memory: StoreMemory, puller: Puller, executor: Executor) -> None:
        self._memory, self._puller, self._executor = memory, puller, executor

    async def read(
        self,
        endpoint: Endpoint,
        place: int,
        info: TailInfo,
        deadline_s: float,
        *,
        held: Callable[[], Awaitable[bool]] | None = None,
    ) -> str:
        """Read the tail in ``place`` of a peer's region and keep it; ``done``, or what went wrong.

        Not to be cancelled: run it in a task that is awaited to its end.

        Args:
            endpoint: The peer.
            place: Slot of its region of tails.
            info: What it has to be.
            deadline_s: From now on.
            held: Asked once the bytes are here: whether they still were the peer's promise.
        """
        slot = self._memory.tails.reserve()
        if slot is None:
            return "no_room"
        outcome = await self._puller.fill(
            endpoint,
            TAILS,
            [place],
            [slot],
            into=TAILS,
            owner=self._memory.tails,
            nbytes=self._memory.geometry.tail_bytes,
            deadline_s=deadline_s,
        )
        if outcome is not ReadOutcome.DONE:
            return "late" if outcome is ReadOutcome.LATE else "unread"
        if held is not None and not await held():
            self._memory.tails.abort(slot)
            return "lease_lost"
        sealed = await asyncio.get_running_loop().run_in_executor(self._executor, self._seal, slot, info)
        return "done" if sealed else "corrupt"

    def _seal(self, slot: Slot, info: TailInfo) -> bool:
        try:
            self._memory.tails.seal(slot, info, checksum=CHECKSUM)
        except CorruptBlock:
            return False
        return True
