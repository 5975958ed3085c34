"""Blocks read or written lately, in host memory: between device pages and SSD.

A block takes one slot of a ``StagingPool`` and lies there as it lies everywhere: payload, header, padding. So peers and
disks read it where it is. The pool's size bounds the bytes. Thread-safe: one lock for names and owners; copies and
checksums run outside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from epdserve.kvstore.block_events import EventBuffer
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader, Checksum, verify_block
from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import ConservationError, CorruptBlock
from epdserve.kvstore.host_metrics import HostCacheMetrics
from epdserve.kvstore.host_pins import Entry, PinnedBlock
from epdserve.kvstore.prefix_index import PrefixIndex
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import Bytes, StagingPool
from epdserve.kvstore.types import BlockEvents, BlockHash, PageId


class HostCache:
    """Finds, keeps and evicts blocks in the slots of one pool, which nobody else takes slots from.

    Unpinned blocks go when room is needed: leaves first where parents are known, the least recently used leaf of all
    first. The first block stored under a hash stays; only an exact one replaces a tainted one.
    """

    def __init__(
        self,
        slots: StagingPool,
        *,
        clock: Clock | None = None,
        metrics: HostCacheMetrics | None = None,
        event_capacity: int = 65536,
    ) -> None:
        self._slots = slots
        self._clock = clock or SystemClock()
        self._metrics = metrics or HostCacheMetrics.unregistered()
        self._lock = threading.Lock()
        self._index = PrefixIndex()  # a slot's index is a block's page
        self._entries: dict[PageId, Entry] = {}
        self._leaving: set[int] = set()  # slots out of the index that readers still look at
        self._filling: set[Slot] = set()
        self._quarantined: set[Slot] = set()
        self._events = EventBuffer(event_capacity)

    # -- in -------------------------------------------------------------------------------------------------

    def put(
        self,
        page: Bytes,
        header: BlockHeader,
        *,
        parent: BlockHash | None,
        checksum: Checksum | None = None,
    ) -> bool:
        """Copy a block in, once: a block that is held already only counts as used.

        Args:
            page: (slot_bytes,) uint8: payload, header, padding. May change meanwhile; what is kept is verified.
            header: What the page has to hold.
            parent: The block before it in its prompt, None for a first one.
            checksum: Verifies the payload too; without it only the 64 bytes of the header are compared.

        Returns:
            Whether the block is held now; False when every slot is pinned or being filled.

        Raises:
            CorruptBlock: The page holds something else. Nothing is kept.
            ValueError: A page of another size.
        """
        if page.shape != (self._slots.slot_bytes,):
            raise ValueError(f"a page has {self._slots.slot_bytes} bytes, got {page.shape}")
        if self._touch(header):
            return True
        slot = self.reserve()
        if slot is None:
            return False
        np.copyto(self._slots.bytes_of(slot), page)
        self.seal(slot, header, parent=parent, checksum=checksum)
        return True

    def reserve(self) -> Slot | None:
        """A slot to fill in place, by a transfer or a disk; evicts as needed. None: all are pinned or being filled.

        Ends with ``seal``, ``abort`` or ``quarantine``. The bytes are ``StagingPool.bytes_of``.
        """
        with self._lock:
            slot = self._slots.acquire()
            idle_s: list[float] = []
            while slot is None and self._index.evictable:
                victim = self._index.evict()
                idle_s.append(self._clock.monotonic() - victim.used_at)
                self._forget(self._entries[victim.page])
                slot = self._slots.acquire()
            if slot is not None:
                self._filling.add(slot)
        if slot is None:
            self._metrics.put_refused.inc()
        if idle_s:
            self._metrics.made_room(idle_s)
        return slot

    def seal(
        self,
        slot: Slot,
        header: BlockHeader,
        *,
        parent: BlockHash | None,
        checksum: Checksum | None = None,
    ) -> None:
        """Let a filled slot be found under its hash. Frees it instead if the block is held already.

        Raises:
            CorruptBlock: The slot holds something else than ``header`` says. The slot is free again.
        """
        try:
            _verify(self._slots.bytes_of(slot), header, checksum)
        except BaseException as error:
            self.abort(slot)
            if isinstance(error, CorruptBlock):
                self._metrics.put_corrupt.inc()
            raise
        with self._lock:
            self._filling.remove(slot)
            held = self._find(header.block_hash)
            if held is not None and (held.header.exact or not header.exact):
                self._slots.release(slot)
                self._metrics.put_again.inc()
                return
            if held is not None:
                self._index.drop(header.block_hash)
                self._forget(held)
                self._metrics.evicted["replaced_by_exact"].inc()
            page = PageId(slot.index)
            self._index.insert_idle(header.block_hash, page, parent, self._clock.monotonic())
            self._entries[page] = Entry(header, slot)
            self._events.note(header.block_hash, held=True)
        self._metrics.put_new.inc()

    def abort(self, slot: Slot) -> None:
        """Free a slot that was being filled."""
        with self._lock:
            self._filling.remove(slot)
            self._slots.release(slot)

    def quarantine(self, slot: Slot) -> None:
        """Set apart a slot that was being filled by a transfer of unknown state."""
        with self._lock:
            self._filling.remove(slot)
            self._slots.quarantine(slot)
            self._quarantined.add(slot)

    def transfer_over(self, slot: Slot) -> None:
        """Free a quarantined slot: its transfer is known to be over, or its agent closed."""
        with self._lock:
            self._quarantined.remove(slot)
            self._slots.transfer_over(slot)

    # -- out ------------------------------------------------------------------------------------------------

    def get(
        self, block_hash: BlockHash, *, exact: bool = False, checksum: Checksum | None = None
    ) -> PinnedBlock | None:
        """One block, pinned until its ``release``; None is a miss.

        Args:
            block_hash: Which.
            exact: A tainted block is a miss.
            checksum: Verifies the payload before it is handed out. A corrupt block is dropped, and a miss.
        """
        found = self.match([block_hash], exact=exact, checksum=checksum)
        return found[0] if found else None

    def match(
        self, hashes: Sequence[BlockHash], *, exact: bool = False, checksum: Checksum | None = None
    ) -> list[PinnedBlock]:
        """Longest held prefix of a chain, each block pinned until its ``release``. Arguments as for ``get``."""
        pinned: list[PinnedBlock] = []
        with self._lock:
            for block_hash in hashes:
                entry = self._find(block_hash)
                if entry is None or (exact and not entry.header.exact):
                    break
                pinned.append(self._pin(entry))
        if checksum is not None:
            pinned = self._sound_prefix(pinned, checksum)
        self._metrics.looked_up(hits=len(pinned), misses=len(hashes) - len(pinned))
        return pinned

    def copy_prefix(
        self,
        hashes: Sequence[BlockHash],
        pages: Sequence[Bytes],
        *,
        exact: bool = False,
        checksum: Checksum | None = None,
    ) -> list[BlockHeader]:
        """Copy the longest held prefix of a chain into ``pages``; returns the header of each block copied.

        Args:
            hashes: Chain of a prompt, first block first.
            pages: (slot_bytes,) uint8 each, at least as many as ``hashes``.
            exact: Stop at the first tainted block.
            checksum: Verifies each payload where it lies; the copy ends before a corrupt one, which is dropped.
        """
        pinned = self.match(hashes, exact=exact, checksum=checksum)
        try:
            for block, page in zip(pinned, pages, strict=False):
                np.copyto(page, block.page)
            return [block.header for block in pinned]
        finally:
            self.release(pinned)

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest held prefix in blocks; pins nothing and counts nothing."""
        with self._lock:
            for length, block_hash in enumerate(hashes):
                if self._index.get(block_hash) is None:
                    return length
        return len(hashes)

    def release(self, pinned: Iterable[PinnedBlock]) -> None:
        """End pins, each once; the blocks' chain is released from its end, so that parents stay the fresher ones."""
        with self._lock:
            now = self._clock.monotonic()
            for block in reversed(list(pinned)):
                self._unpin(block.end(), now)

    def delete(self, hashes: Iterable[BlockHash]) -> int:
        """Forget blocks at once, pinned ones too (their readers keep the bytes); returns how many were held."""
        count = 0
        with self._lock:
            for block_hash in hashes:
                entry = self._find(block_hash)
                if entry is not None:
                    self._index.drop(block_hash)
                    self._forget(entry)
                    count += 1
        self._metrics.evicted["deleted"].inc(count)
        return count

    # -- about ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def held_bytes(self) -> int:
        """Bytes of the blocks that can be found."""
        return len(self._entries) * self._slots.slot_bytes

    def pinned(self) -> int:
        """Blocks that are being read, deleted ones among them."""
        with self._lock:
            return sum(entry.pins > 0 for entry in self._entries.values()) + len(self._leaving)

    def drain_events(self) -> BlockEvents:
        """Changes of the held set since the last call. One reader; it passes batches on to others."""
        with self._lock:
            return self._events.drain()

    def snapshot(self) -> tuple[int, tuple[BlockHash, ...]]:
        """(number of the next event, every hash held). Later batches may repeat what the snapshot holds already."""
        with self._lock:
            return self._events.next_seq, tuple(self._index.hashes())

    def check(self) -> None:
        """Recount everything.

        Raises:
            ConservationError: Slots, pins or index do not add up.
        """
        self._slots.check()
        with self._lock:
            problems = self._problems()
        if problems:
            raise ConservationError(problems)

    # -- under the lock, unless said otherwise --------------------------------------------------------------

    def _find(self, block_hash: BlockHash) -> Entry | None:
        page = self._index.get(block_hash)
        return None if page is None else self._entries[page]

    def _touch(self, header: BlockHeader) -> bool:
        """Not under the lock. Whether the block is held already, or a better one; then it is used now."""
        with self._lock:
            held = self._find(header.block_hash)
            if held is None or (header.exact and not held.header.exact):
                return False
            if not held.pins:
                self._index.touch(header.block_hash, self._clock.monotonic())
        self._metrics.put_again.inc()
        return True

    def _pin(self, entry: Entry) -> PinnedBlock:
        if not entry.pins:
            self._index.hold(entry.header.block_hash)
        entry.pins += 1
        return PinnedBlock(self, entry, self._slots.readable(entry.slot))

    def _unpin(self, entry: Entry, now: float) -> None:
        entry.pins -= 1
        if entry.pins:
            return
        if entry.slot.index in self._leaving:
            self._leaving.remove(entry.slot.index)
            self._slots.release(entry.slot)
        else:
            self._index.rest(entry.header.block_hash, now)

    def _forget(self, entry: Entry) -> None:
        """Of a block that has just left the index."""
        del self._entries[PageId(entry.slot.index)]
        self._events.note(entry.header.block_hash, held=False)
        if entry.pins:
            self._leaving.add(entry.slot.index)
        else:
            self._slots.release(entry.slot)

    def _sound_prefix(self, pinned: list[PinnedBlock], checksum: Checksum) -> list[PinnedBlock]:
        """Not under the lock. Verify in order; drop the first corrupt block and let go of what follows it."""
        for length, block in enumerate(pinned):
            try:
                verify_block(block.page.data, block.header, checksum)
            except CorruptBlock:
                self._drop_corrupt(block)
                self.release(pinned[length:])
                return pinned[:length]
            except BaseException:
                self.release(pinned)
                raise
        return pinned

    def _drop_corrupt(self, block: PinnedBlock) -> None:
        """Not under the lock."""
        with self._lock:
            entry = self._find(block.header.block_hash)
            if entry is None or entry.slot != block.slot:
                return  # somebody dropped or replaced it already
            self._index.drop(block.header.block_hash)
            self._forget(entry)
        self._metrics.evicted["corrupt"].inc()

    def _problems(self) -> list[str]:
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


def _verify(page: Bytes, header: BlockHeader, checksum: Checksum | None) -> None:
    if checksum is not None:
        verify_block(page.data, header, checksum)
    else:
        header.verify(page.data[header.payload_bytes : header.payload_bytes + HEADER_BYTES])
