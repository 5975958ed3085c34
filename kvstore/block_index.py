"""Who holds which block, as far as they told us: snapshots and numbered events of many workers.

A hint, never a promise: a block may be gone by the time a request arrives. Not thread-safe; owned by one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epdserve.kvstore.holder_table import HolderTable
from epdserve.kvstore.types import BlockEvents, BlockHash


@dataclass(slots=True)
class _Worker:
    number: int  # of this worker as a holder; its bit in masks
    next_seq: int


@dataclass(frozen=True, slots=True)
class BlockIndexCounts:
    """Size and news of a ``BlockIndex``."""

    workers: int
    hashes: int
    snapshots: int
    events: int
    gaps: int


class BlockIndex:
    """Applies workers' block events and answers how much of a chain each worker holds.

    A worker is any name. A restarted worker counts its events from 0 again: load its snapshot, which every
    connection to a worker should begin with, or ``forget`` it first.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._table = HolderTable()  # one lookup answers for all workers
        self._free_numbers: list[int] = []
        self._names: list[str] = []  # by number; of one that is free, its last one
        self._snapshots = 0
        self._events = 0
        self._gaps = 0

    def load_snapshot(self, worker: str, next_seq: int, hashes: Iterable[BlockHash]) -> None:
        """Replace what is known of a worker.

        Args:
            worker: Known or new.
            next_seq: Number of the first event the snapshot need not contain.
            hashes: Every block the worker holds.
        """
        known = self._workers.get(worker)
        if known is None:
            known = self._workers[worker] = _Worker(self._number(worker), next_seq)
        else:
            self._table.clear(known.number)
        self._table.add(known.number, tuple(hashes))
        known.next_seq = next_seq
        self._snapshots += 1

    def apply(self, worker: str, events: BlockEvents) -> bool:
        """Apply a batch; False asks for a snapshot, because events are missing or the worker is unknown.

        A batch from before the snapshot is skipped.
        """
        known = self._workers.get(worker)
        if known is None or events.first_seq > known.next_seq:
            self._gaps += 1
            return False
        if events.next_seq <= known.next_seq:
            return True
        self._table.add(known.number, events.added)
        self._table.discard(known.number, events.removed)
        known.next_seq = events.next_seq
        self._events += len(events.added) + len(events.removed)
        return True

    def digest(self, worker: str) -> bytes | None:
        """Digest of what is known of a worker (``set_digest``), None for an unknown one."""
        known = self._workers.get(worker)
        return None if known is None else self._table.digest(known.number)

    def forget(self, worker: str) -> None:
        """Drop a worker that is gone; unknown ones are ignored."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._table.clear(known.number)
            self._free_numbers.append(known.number)

    def _number(self, worker: str) -> int:
        """A number for a new worker, which is called by it from now on."""
        if not self._free_numbers:
            self._names.append(worker)
            return len(self._names) - 1
        number = self._free_numbers.pop()
        self._names[number] = worker
        return number

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Blocks of a chain each worker holds from its start on; workers that hold none are left out."""
        return self._table.prefix_lengths(hashes, self._names)

    def counts(self) -> BlockIndexCounts:
        """Size and news so far."""
        return BlockIndexCounts(
            len(self._workers), len(self._table), self._snapshots, self._events, self._gaps
        )
