"""Blocks read or written lately, in host memory: between device pages and SSD.

A block takes one slot of a ``StagingPool`` and lies there as it lies everywhere: payload, header, padding. So peers and
disks read it where it is. The pool's size bounds the bytes. Thread-safe: one lock for names and owners; copies and
checksums run outside it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final

from epdserve.kvstore.block_header import BlockHeader, Checksum
from epdserve.kvstore.checksums import copy_blocks, require_header, require_sum, sound_until, sum_blocks
from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import ConservationError, CorruptBlock
from epdserve.kvstore.host_metrics import HostCacheMetrics
from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.host_shelf import Shelf
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import Bytes, StagingPool
from epdserve.kvstore.types import BlockEvents, BlockHash

_PORTION: Final = 128  # blocks that are copied together: 15 MB of the released model, 2 ms


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
        self._shelf = Shelf(slots, self._clock, event_capacity, self._metrics)

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
        return self.put_chain([page], [header], parent=parent, checksum=checksum) == 1

    def put_chain(
        self,
        pages: Sequence[Bytes],
        headers: Sequence[BlockHeader],
        *,
        parent: BlockHash | None,
        checksum: Checksum | None = None,
    ) -> int:
        """``put`` for blocks that follow one another, the first one after ``parent``; cheaper than one by one.

        Returns:
            How many of them, from the first on, are held now.

        Raises:
            CorruptBlock: A page holds something else; the ones before it are kept.
            ValueError: A page of another size, or not as many pages as headers.
        """
        if len(pages) != len(headers) or any(page.shape != (self._slots.slot_bytes,) for page in pages):
            raise ValueError(
                f"{len(headers)} headers need as many pages of {self._slots.slot_bytes} bytes, "
                f"got {[page.shape for page in pages]}"
            )
        done = 0
        while done < len(pages):
            until = done + _PORTION
            some = self._put_portion(pages[done:until], headers[done:until], parent, checksum)
            done += some
            if some < len(headers[done - some : until]):
                break
            parent = headers[done - 1].block_hash
        return done

    def reserve(self) -> Slot | None:
        """A slot to fill in place, by a transfer or a disk; evicts as needed. None: all are pinned or being filled.

        Ends with ``seal``, ``abort`` or ``quarantine``. The bytes are ``StagingPool.bytes_of``.
        """
        with self._lock:
            slots, idle_s = self._shelf.take(1)
        if not slots:
            self._metrics.put_refused.inc()
        if idle_s:
            self._metrics.made_room(idle_s)
        return slots[0] if slots else None

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
            page = self._slots.bytes_of(slot)
            require_header(page, header)
            if checksum is not None:
                require_sum(checksum(page.data[: header.payload_bytes], header.block_hash), header)
        except BaseException as error:
            self.abort(slot)
            if isinstance(error, CorruptBlock):
                self._metrics.put_corrupt.inc()
            raise
        with self._lock:
            kept = self._shelf.insert(slot, header, parent, self._clock.monotonic())
        (self._metrics.put_new if kept else self._metrics.put_again).inc()

    def abort(self, slot: Slot) -> None:
        """Free a slot that was being filled."""
        with self._lock:
            self._shelf.abort(slot)

    def quarantine(self, slot: Slot) -> None:
        """Set apart a slot that was being filled by a transfer of unknown state."""
        with self._lock:
            self._shelf.quarantine(slot)

    def transfer_over(self, slot: Slot) -> None:
        """Free a quarantined slot: its transfer is known to be over, or its agent closed."""
        with self._lock:
            self._shelf.transfer_over(slot)

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
        pinned = self._pin(hashes, exact=exact)
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
            checksum: Verifies each payload as it arrives; a corrupt block ends the chain and is dropped. Pages from it
                on hold anything.
        """
        pinned = self._pin(hashes[: len(pages)], exact=exact)
        copied: list[BlockHeader] = []
        try:
            targets = [page for page, _ in zip(pages, pinned, strict=False)]
            headers = [block.header for block in pinned]
            sums = copy_blocks(targets, [block.page for block in pinned], headers, checksum)
            for number, header in enumerate(headers):
                if not self._sound(pinned[number], targets[number], None if sums is None else sums[number]):
                    break
                copied.append(header)
            return copied
        finally:
            self.release(pinned)
            self._metrics.looked_up(hits=len(copied), misses=len(hashes) - len(copied))

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest held prefix in blocks; pins nothing and counts nothing."""
        with self._lock:
            for length, block_hash in enumerate(hashes):
                if self._shelf.find(block_hash) is None:
                    return length
        return len(hashes)

    def release(self, pinned: Iterable[PinnedBlock]) -> None:
        """End pins, each once; the blocks' chain is released from its end, so that parents stay the fresher ones."""
        with self._lock:
            now = self._clock.monotonic()
            for block in reversed(list(pinned)):
                self._shelf.unpin(block.end(), now)

    def delete(self, hashes: Iterable[BlockHash]) -> int:
        """Forget blocks at once, pinned ones too (their readers keep the bytes); returns how many were held."""
        count = 0
        with self._lock:
            for block_hash in hashes:
                entry = self._shelf.find(block_hash)
                if entry is not None:
                    self._shelf.drop(entry)
                    count += 1
        self._metrics.evicted["deleted"].inc(count)
        return count

    # -- about ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._shelf)

    def held_bytes(self) -> int:
        """Bytes of the blocks that can be found."""
        return len(self._shelf) * self._slots.slot_bytes

    def pinned(self) -> int:
        """Blocks that are being read, deleted ones among them."""
        with self._lock:
            return self._shelf.pinned()

    def drain_events(self) -> BlockEvents:
        """Changes of the held set since the last call. One reader; it passes batches on to others."""
        with self._lock:
            return self._shelf.events.drain()

    def snapshot(self) -> tuple[int, tuple[BlockHash, ...]]:
        """(number of the next event, every hash held). Later batches may repeat what the snapshot holds already."""
        with self._lock:
            return self._shelf.events.next_seq, self._shelf.hashes()

    def check(self) -> None:
        """Recount everything.

        Raises:
            ConservationError: Slots, pins or index do not add up.
        """
        self._slots.check()
        with self._lock:
            problems = self._shelf.problems()
        if problems:
            raise ConservationError(problems)

    # -- inside: called without the lock ---------------------------------------------------------------------

    def _put_portion(
        self,
        pages: Sequence[Bytes],
        headers: Sequence[BlockHeader],
        parent: BlockHash | None,
        checksum: Checksum | None,
    ) -> int:
        """As ``put_chain``; all slots are taken before the first is filled."""
        with self._lock:
            now = self._clock.monotonic()
            fresh = [number for number, header in enumerate(headers) if not self._shelf.touch(header, now)]
            slots, idle_s = self._shelf.take(len(fresh))
        until = len(headers) if len(slots) == len(fresh) else fresh[len(slots)]  # no room for that one
        kept = [headers[number] for number in fresh[: len(slots)]]
        sound, error = 0, None
        try:
            targets = [self._slots.bytes_of(slot) for slot in slots]
            sums = copy_blocks(targets, [pages[number] for number in fresh[: len(slots)]], kept, checksum)
            sound, error = sound_until(targets, kept, sums)
        finally:
            new = self._settle(
                slots, kept, [headers[n - 1].block_hash if n else parent for n in fresh], sound
            )
            again = until - len(slots) if sound == len(slots) else fresh[sound] - sound
            self._metrics.put_new.inc(new)
            self._metrics.put_again.inc(sound - new + again)
            if until < len(headers):
                self._metrics.put_refused.inc()
            if idle_s:
                self._metrics.made_room(idle_s)
        if error is not None:
            self._metrics.put_corrupt.inc()
            raise error
        return until

    def _settle(
        self,
        slots: Sequence[Slot],
        headers: Sequence[BlockHeader],
        parents: Sequence[BlockHash | None],
        sound: int,
    ) -> int:
        """Keep the first ``sound`` of a portion, free the others; returns how many are new."""
        with self._lock:
            filled = list(zip(slots[:sound], headers, parents, strict=False))
            new = self._shelf.insert_all(filled, self._clock.monotonic())
            for slot in slots[sound:]:
                self._shelf.abort(slot)
        return new

    def _pin(self, hashes: Sequence[BlockHash], *, exact: bool) -> list[PinnedBlock]:
        pinned: list[PinnedBlock] = []
        with self._lock:
            for block_hash in hashes:
                entry = self._shelf.find(block_hash)
                if entry is None or (exact and not entry.header.exact):
                    break
                self._shelf.pin(entry)
                pinned.append(PinnedBlock(self, entry, self._slots.readable(entry.slot)))
        return pinned

    def _sound_prefix(self, pinned: list[PinnedBlock], checksum: Checksum) -> list[PinnedBlock]:
        """Verify; drop the first corrupt block and let go of what follows it."""
        try:
            sums = sum_blocks(checksum, [block.page for block in pinned], [block.header for block in pinned])
        except BaseException:
            self.release(pinned)
            raise
        for length, (block, total) in enumerate(zip(pinned, sums, strict=True)):
            if not self._sound(block, block.page, total):
                self.release(pinned[length:])
                return pinned[:length]
        return pinned

    def _sound(self, block: PinnedBlock, page: Bytes, total: int | None) -> bool:
        """Whether a page with the block, and its sum if known, is what was put; drops the block if it is not."""
        try:
            require_header(page, block.header)
            if total is not None:
                require_sum(total, block.header)
        except CorruptBlock:
            self._drop_corrupt(block)
            return False
        return True

    def _drop_corrupt(self, block: PinnedBlock) -> None:
        with self._lock:
            entry = self._shelf.find(block.header.block_hash)
            if entry is None or entry.slot != block.slot:
                return  # somebody dropped or replaced it already
            self._shelf.drop(entry)
        self._metrics.evicted["corrupt"].inc()
