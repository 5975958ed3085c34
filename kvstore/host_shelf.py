"""Which slot holds which block, who reads it, and what may go next. Not thread-safe; owned by ``HostCache``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from epdserve.kvstore.block_events import EventBuffer
from epdserve.kvstore.block_header import BlockHeader
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.host_metrics import HostCacheMetrics
from epdserve.kvstore.host_pins import Entry
from epdserve.kvstore.prefix_index import PrefixIndex
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.types import BlockHash, BlockOwner, PageId


class Shelf:
    """The names of a ``HostCache`` over the slots of a pool; moves no bytes."""

    def __init__(
        self, slots: StagingPool, clock: Clock, event_capacity: int, metrics: HostCacheMetrics
    ) -> None:
        self._slots = slots
        self._clock = clock
        self._metrics = metrics
        self._index = PrefixIndex()  # a slot's index is a block's page
        self._entries: dict[PageId, Entry] = {}
        self._leaving: set[int] = set()  # slots out of the index that readers still look at
        self._filling: set[int] = set()
        self._quarantined: set[int] = set()
        self.events = EventBuffer(event_capacity)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, block_hash: BlockHash) -> Entry | None:
        """The block, if it is held."""
        page = self._index.get(block_hash)
        return None if page is None else self._entries[page]

    def hashes(self) -> tuple[BlockHash, ...]:
        """Every block held."""
        return tuple(self._index.hashes())

    def owned(self, condemned: Callable[[BlockOwner], bool]) -> list[Entry]:
        """Blocks whose owner is condemned."""
        return [e for e in self._entries.values() if e.owner is not None and condemned(e.owner)]

    def pinned(self) -> int:
        """Blocks that are being read, those that are out of the index already among them."""
        return sum(entry.pins > 0 for entry in self._entries.values()) + len(self._leaving)

    def take(self, count: int) -> tuple[list[Slot], list[float]]:
        """Slots to fill, as many as can be had, and how long each block evicted for them had been idle."""
        idle_s: list[float] = []
        slots = self._slots.acquire_some(count)
        while len(slots) < count and self._index.evictable:
            (victim,) = self._index.evict()
            idle_s.append(self._clock.monotonic() - victim.used_at)
            self._forget(self._entries[victim.page])
            slots += self._slots.acquire_some(1)
        self._filling.update([slot.index for slot in slots])
        return slots, idle_s

    def touch(self, header: BlockHeader, now: float) -> bool:
        """Whether the block is held already, or a better one; then it is used now."""
        held = self.find(header.block_hash)
        if held is None or (header.exact and not held.header.exact):
            return False
        if not held.pins:
            self._index.touch(header.block_hash, now)
        return True

    def insert(
        self,
        slot: Slot,
        header: BlockHeader,
        parent: BlockHash | None,
        now: float,
        owner: BlockOwner | None = None,
    ) -> bool:
        """Whether a filled and verified slot was kept; it is freed if the block is held already."""
        return self.insert_all([(slot, header, parent)], now, owner) == 1

    def insert_all(
        self,
        filled: Sequence[tuple[Slot, BlockHeader, BlockHash | None]],
        now: float,
        owner: BlockOwner | None = None,
    ) -> int:
        """``insert`` of slots with header and parent; returns how many were kept."""
        coming: dict[BlockHash, tuple[BlockHash, PageId, BlockHash | None]] = {}
        kept = 0
        for slot, header, parent in filled:
            block_hash = header.block_hash
            if block_hash in coming:
                self._bring_in(coming, now)
            if not self._beats_held(header):
                self.abort(slot)
                continue
            index: PageId = slot.index  # type: ignore[assignment]  # to call NewType takes longer than all of this
            coming[block_hash] = (block_hash, index, parent)
            self._entries[index] = Entry(header, slot, 0, parent, owner)
            kept += 1
        self._bring_in(coming, now)
        return kept

    def _bring_in(
        self, coming: dict[BlockHash, tuple[BlockHash, PageId, BlockHash | None]], now: float
    ) -> None:
        """Let blocks be found whose entries are there; empties ``coming``."""
        self._index.insert_idle(list(coming.values()), now)
        self._filling.difference_update([page for _, page, _ in coming.values()])
        self.events.note_held(coming)
        coming.clear()

    def _beats_held(self, header: BlockHeader) -> bool:
        """Whether a block is to be kept; a worse one that is held is dropped."""
        held = self.find(header.block_hash)
        if held is None:
            return True
        if held.header.exact or not header.exact:
            return False
        self.drop(held)
        self._metrics.evicted["replaced_by_exact"].inc()
        return True

    def abort(self, slot: Slot) -> None:
        """Free a slot that was being filled."""
        self._slots.release(slot)
        self._filling.remove(slot.index)

    def quarantine(self, slot: Slot) -> None:
        """Set apart a slot that was being filled."""
        self._slots.quarantine(slot)
        self._filling.remove(slot.index)
        self._quarantined.add(slot.index)

    def transfer_over(self, slot: Slot) -> None:
        """Free a quarantined slot."""
        self._slots.transfer_over(slot)
        self._quarantined.remove(slot.index)

    def pin(self, entry: Entry) -> None:
        """One more reader."""
        if not entry.pins:
            self._index.hold(entry.header.block_hash)
        entry.pins += 1

    def unpin(self, entry: Entry, now: float) -> None:
        """One reader less; frees the slot of a block that is out of the index."""
        entry.pins -= 1
        if entry.pins:
            return
        if entry.slot.index in self._leaving:
            self._leaving.remove(entry.slot.index)
            self._slots.release(entry.slot)
        else:
            self._index.rest(entry.header.block_hash, now)

    def drop(self, entry: Entry) -> None:
        """Take a held block out of the index, read or not."""
        self._index.drop(entry.header.block_hash)
        self._forget(entry)

    def problems(self) -> list[str]:
        """What does not add up."""
        problems = []
        counts = self._slots.counts()
        known = len(self._entries) + len(self._leaving) + len(self._filling)
        if counts.held != known or counts.quarantined != len(self._quarantined):
            problems.append(f"{counts} of slots, {known} held and {len(self._quarantined)} quarantined here")
        recounted = self._index.recount()
        if recounted != (len(self._index), self._index.evictable) or len(self._index) != len(self._entries):
            problems.append(
                f"{len(self._entries)} entries, index counts {(len(self._index), self._index.evictable)}, "
                f"recount gives {recounted}"
            )
        for page, entry in self._entries.items():
            if self._index.get(entry.header.block_hash) != page or entry.slot.index != page or entry.pins < 0:
                problems.append(f"slot {page} does not fit its block {entry.header.block_hash.hex()}")
        return problems

    def _forget(self, entry: Entry) -> None:
        del self._entries[PageId(entry.slot.index)]
        self.events.note(entry.header.block_hash, held=False)
        if entry.pins:
            self._leaving.add(entry.slot.index)
        else:
            self._slots.release(entry.slot)
