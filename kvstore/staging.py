"""Fixed places of host memory that transfers and direct I/O read and write. Thread-safe.

One mapping for all slots: page-aligned, touched at start, never moved. A peer reads a slot by its index, a disk by
its address.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.errors import SlotNotHeld
from epdserve.kvstore.slots import Slot, SlotCounts, SlotPool
from epdserve.kvstore.types import MemoryRegion

PAGE_BYTES: Final = 4096  # what direct I/O wants addresses and lengths to be multiples of

Bytes = npt.NDArray[np.uint8]


class StagingPool:
    """Slots of equal size in one mapping, each with one owner at a time.

    Owners are told apart by generation: who gave a slot back can neither look at it nor free it any more. The memory
    lives as long as this object, or an array of one of its slots, does.
    """

    def __init__(self, name: str, *, slot_bytes: int, count: int) -> None:
        """Map and touch ``slot_bytes * count`` bytes.

        Args:
            name: Of the region that peers read.
            slot_bytes: A positive multiple of 4096.
            count: Slots, at least 1.

        Raises:
            ValueError: A size that cannot be.
            OSError: The machine does not give that much memory.
        """
        if slot_bytes <= 0 or slot_bytes % PAGE_BYTES or count <= 0:
            raise ValueError(
                f"slots have a multiple of {PAGE_BYTES} bytes, got {count} slots of {slot_bytes} bytes"
            )
        self._slots = SlotPool(count)
        self._owners = [0] * count  # generation of who holds a slot; 0 = nobody
        memory = mmap.mmap(-1, slot_bytes * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # a fork would leave devices with pages that are ours no more
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._pages = np.frombuffer(memory, np.uint8).reshape(count, slot_bytes)
        self._pages[:, ::PAGE_BYTES] = 0  # memory that is not there shows now and not under load
        self._rows = list(self._pages)
        readable = self._pages.view()
        readable.flags.writeable = False
        self._readable = list(readable)
        self.region: Final = MemoryRegion(name, self._pages.ctypes.data, slot_bytes, count)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.region.stride

    def acquire(self) -> Slot | None:
        """A slot of one's own, with the bytes of its last owner in it, or None when all are taken."""
        slots = self.acquire_some(1)
        return slots[0] if slots else None

    def acquire_some(self, count: int) -> list[Slot]:
        """``acquire`` of several, fewer than ``count`` when all are taken."""
        slots = self._slots.acquire_some(count)
        for index, generation in slots:
            self._owners[index] = generation
        return slots

    def bytes_of(self, slot: Slot) -> Bytes:
        """(slot_bytes,) uint8, writable: the slot itself and no copy.

        Raises:
            SlotNotHeld: It is free, quarantined, or a later owner's.
        """
        self._require(slot)
        return self._rows[slot.index]

    def readable(self, slot: Slot) -> Bytes:
        """As ``bytes_of``, but read-only."""
        self._require(slot)
        return self._readable[slot.index]

    def release(self, slot: Slot) -> None:
        """Give a slot back.

        Raises:
            SlotNotHeld: It is not held, or by a later owner.
        """
        self._disown(slot)
        self._slots.release(slot)

    def quarantine(self, slot: Slot) -> None:
        """Set apart the destination of a transfer of unknown state: a late write may still land.

        Raises:
            SlotNotHeld: It is not held, or by a later owner.
        """
        self._disown(slot)
        self._slots.quarantine(slot)

    def transfer_over(self, slot: Slot) -> None:
        """Free a quarantined slot: the transfer is known to be over, or its agent closed.

        Raises:
            SlotNotHeld: It is not quarantined, or belongs to a later owner.
        """
        self._slots.transfer_over(slot)

    def counts(self) -> SlotCounts:
        """Slots by state."""
        return self._slots.counts()

    def check(self) -> None:
        """Recount.

        Raises:
            ConservationError: Free list and states differ.
        """
        self._slots.check()

    def _require(self, slot: Slot) -> None:
        if not 0 <= slot.index < len(self._owners) or self._owners[slot.index] != slot.generation:
            raise SlotNotHeld(slot.index, slot.generation, "not its owner's")

    def _disown(self, slot: Slot) -> None:
        # before the slot is free: afterwards it may be someone else's already
        if 0 <= slot.index < len(self._owners) and self._owners[slot.index] == slot.generation:
            self._owners[slot.index] = 0
