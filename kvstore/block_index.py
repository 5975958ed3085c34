"""Who holds which block, as far as they told us: snapshots and numbered events of many workers.

A hint, never a promise: a block may be gone by the time a request arrives. Not thread-safe; owned by one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from epdserve.kvstore.types import BlockEvents, BlockHash


@dataclass(slots=True)
class _Worker:
    bit: int  # this worker's bit in the masks of ``BlockIndex``
    next_seq: int
    hashes: set[BlockHash] = field(default_factory=set)


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
        self._holders: dict[BlockHash, int] = {}  # bit mask of workers: one lookup answers for all of them
        self._free_bits: list[int] = []
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
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._workers)
            known = self._workers[worker] = _Worker(bit, next_seq)
        fresh = set(hashes)
        for block_hash in known.hashes - fresh:
            self._drop(known, block_hash)
        for block_hash in fresh - known.hashes:
            self._add(known, block_hash)
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
        for block_hash in events.added:
            if block_hash not in known.hashes:
                self._add(known, block_hash)
        for block_hash in events.removed:
            if block_hash in known.hashes:
                self._drop(known, block_hash)
        known.next_seq = events.next_seq
        self._events += len(events.added) + len(events.removed)
        return True

    def forget(self, worker: str) -> None:
        """Drop a worker that is gone; unknown ones are ignored."""
        known = self._workers.pop(worker, None)
        if known is not None:
            for block_hash in tuple(known.hashes):
                self._drop(known, block_hash)
            self._free_bits.append(known.bit)

    def longest_prefix(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        """Blocks of a chain each worker holds from its start on; workers that hold none are left out."""
        names = {known.bit: worker for worker, known in self._workers.items()}
        lengths: dict[str, int] = {}
        mask = sum(names)
        length = 0
        for length, block_hash in enumerate(hashes):
            held = self._holders.get(block_hash, 0) & mask
            if held != mask:
                if length:
                    _note(lengths, names, mask & ~held, length)
                mask = held
                if not mask:
                    return lengths
        if hashes:
            _note(lengths, names, mask, length + 1)
        return lengths

    def counts(self) -> BlockIndexCounts:
        """Size and news so far."""
        return BlockIndexCounts(
            len(self._workers), len(self._holders), self._snapshots, self._events, self._gaps
        )

    def _add(self, known: _Worker, block_hash: BlockHash) -> None:
        known.hashes.add(block_hash)
        self._holders[block_hash] = self._holders.get(block_hash, 0) | known.bit

    def _drop(self, known: _Worker, block_hash: BlockHash) -> None:
        known.hashes.remove(block_hash)
        rest = self._holders[block_hash] & ~known.bit
        if rest:
            self._holders[block_hash] = rest
        else:
            del self._holders[block_hash]


def _note(lengths: dict[str, int], names: dict[int, str], mask: int, length: int) -> None:
    while mask:
        bit = mask & -mask
        lengths[names[bit]] = length
        mask ^= bit
