"""What a store holds, in memory or on disk, as one set with numbered changes."""

from __future__ import annotations

from epdserve.kvstore.lending_cache import LendingCache
from epdserve.kvstore.ssd.tier import SsdTier
from epdserve.kvstore.types import BlockEvents, BlockHash


class StoreEvents:
    """Merges the events of a host cache and an SSD tier; a block has gone when it is in neither.

    The one reader of both; owned by the event loop that its feed runs on.
    """

    def __init__(self, cache: LendingCache, tier: SsdTier | None) -> None:
        self._cache, self._tier = cache, tier
        self._next_seq = 0
        self._expected: dict[str, int] = {}  # next number of each source

    def drain_events(self) -> BlockEvents:
        """What changed since the last call; numbers have a gap where a source has lost changes."""
        added: list[BlockHash] = []
        removed: list[BlockHash] = []
        for block_hash, held in self._changed().items():
            (added if held else removed).append(block_hash)
        events = BlockEvents(self._next_seq, tuple(added), tuple(removed))
        self._next_seq = events.next_seq
        return events

    def snapshot(self) -> tuple[int, tuple[BlockHash, ...]]:
        """Number of the next event, and everything held."""
        _, held = self._cache.snapshot()
        if self._tier is None:
            return self._next_seq, held
        _, stored = self._tier.snapshot()  # the many
        there = self._tier.stored(held)
        return self._next_seq, (*stored, *(h for h, twice in zip(held, there, strict=True) if not twice))

    def _changed(self) -> dict[BlockHash, bool]:
        changed = self._drain("cache", self._cache.drain_events())
        if self._tier is not None:
            changed |= self._drain("tier", self._tier.drain_events())
        hashes = list(changed)
        held = self._cache.held(hashes)
        stored = [False] * len(hashes) if self._tier is None else self._tier.stored(hashes)
        return {
            block_hash: here or there for block_hash, here, there in zip(hashes, held, stored, strict=True)
        }

    def _drain(self, source: str, events: BlockEvents) -> dict[BlockHash, bool]:
        if events.first_seq != self._expected.get(source, events.first_seq):
            self._next_seq += 1  # a number nobody will ever see: listeners ask for a snapshot
        self._expected[source] = events.next_seq
        return dict.fromkeys((*events.added, *events.removed), True)
