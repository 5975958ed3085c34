"""Numbered changes to the set of blocks held, for readers elsewhere.

Not thread-safe; owned by ``BlockManager``.
"""

from __future__ import annotations

from collections.abc import Collection

from epdserve.kvstore.types import BlockEvents, BlockHash


class EventBuffer:
    """Keeps the last change of each hash until it is drained; drops everything and leaves a gap when full.

    A hash that was added and then removed is told as removed, and the other way round: a reader may have
    taken a snapshot between the two.
    """

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._capacity = capacity
        self._pending: dict[BlockHash, bool] = {}  # hash -> is it held now
        self._next_seq = 0
        self.overflows = 0

    @property
    def next_seq(self) -> int:
        """Number of the first event that has not been drained."""
        return self._next_seq

    def note(self, block_hash: BlockHash, *, held: bool) -> None:
        """Record that a block came (``held``) or went."""
        if block_hash not in self._pending and len(self._pending) >= self._capacity:
            self._pending.clear()
            self._next_seq += 1  # a number nobody will ever see: readers notice the gap
            self.overflows += 1
        self._pending[block_hash] = held

    def note_held(self, hashes: Collection[BlockHash]) -> None:
        """``note`` of blocks that came."""
        if len(self._pending) + len(hashes) <= self._capacity:
            self._pending.update(dict.fromkeys(hashes, True))
            return
        for block_hash in hashes:
            self.note(block_hash, held=True)

    def drain(self) -> BlockEvents:
        """Everything since the last call, numbered."""
        added = tuple(block_hash for block_hash, held in self._pending.items() if held)
        removed = tuple(block_hash for block_hash, held in self._pending.items() if not held)
        events = BlockEvents(self._next_seq, added, removed)
        self._pending.clear()
        self._next_seq = events.next_seq
        return events
