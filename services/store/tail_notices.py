"""What the directory of tails is told of this store."""

from __future__ import annotations

from collections.abc import Sequence

from epdserve.kvstore.tail_directory import TailDirectory
from epdserve.kvstore.tails import TailEntry, TailInfo, TailLocation
from epdserve.services.store.memory import StoreMemory
from epdserve.services.store.metrics import StoreMetrics


class TailNotices:
    """Owned by one event loop. What cannot be told costs hits and nothing else.

    Args:
        directory: None if nobody is to be told.
        worker: Name of this store.
        incarnation: This life of it.
    """

    def __init__(
        self,
        memory: StoreMemory,
        directory: TailDirectory | None,
        metrics: StoreMetrics,
        *,
        worker: str,
        incarnation: str,
    ) -> None:
        self._memory, self._directory, self._metrics = memory, directory, metrics
        self._worker, self._incarnation = worker, incarnation
        self._told = 0  # tails before the next one to tell again

    async def tell_again(self, most: int | None = None) -> int:
        """Tell the directory of tails held, ``most`` of them in turn, or all as after it was emptied.

        Returns:
            How many it took.
        """
        held = self._memory.tails.held()
        if most is not None and len(held) > most:
            start = self._told % len(held)
            held = [*held, *held][start : start + most]
            self._told = start + most
        told = 0
        for info, left_s in held:
            told += await self.tell(info, left_s)
        return told

    async def withdraw(self, infos: Sequence[TailInfo]) -> None:
        """Take tails that were deleted out of the directory, as far as it answers."""
        for info in infos:
            if self._directory is not None and (entry := self._entry(info)) is not None:
                await self._directory.withdraw(entry)

    async def tell(self, info: TailInfo, left_s: float) -> bool:
        """Tell of one tail, which has ``left_s`` seconds left."""
        entry = self._entry(info)
        if self._directory is None or entry is None:
            return False
        told = await self._directory.publish(entry, left_s)
        self._metrics.published.labels(result="done" if told else "failed").inc()
        return told

    def _entry(self, info: TailInfo) -> TailEntry | None:
        if info.place is None:
            return None
        nbytes = self._memory.geometry.tail_bytes
        location = TailLocation(self._worker, self._incarnation, nbytes, info.exact)
        return TailEntry(info.identity, info.place, location)
