"""One drive: a locked directory with its slot files and its table of names, and who has each slot.

directory/
  lock            held (flock) by the owner; two owners would write each other's slots
  format.json     sizes; a store of other blocks is refused
  names.tbl       ``catalog.py``
  slots-0000.dat  ``slots.py``
"""

from __future__ import annotations

import enum
import json
import os
from collections import deque
from collections.abc import Iterable
from typing import Final

import numpy as np
from epdserve.kvstore.ssd.catalog import NameTable
from epdserve.kvstore.ssd.crew import Crew
from epdserve.kvstore.ssd.disk import CREATE, Disk, read_fully, write_fully
from epdserve.kvstore.ssd.errors import DirectoryOwned, WrongFormat
from epdserve.kvstore.ssd.record import DELETED, Name, RecordLayout
from epdserve.kvstore.ssd.slots import SlotFiles, aligned
from epdserve.kvstore.types import BLOCK_HASH_BYTES
from numpy.typing import NDArray

FORMAT_VERSION: Final = 1
SLOTS_PER_FILE: Final = 65_536  # 7.5 GB of the real model's blocks
UNKNOWN_USE: Final = 2**62  # last use of a block that was found by scanning: counts as now


class SlotState(enum.IntEnum):
    """Who has a slot. FREE -> WRITING -> LIVE -> LEAVING -> FREE; a bad one is QUARANTINED until restart."""

    FREE = 0
    WRITING = 1
    LIVE = 2
    LEAVING = 3  # the name is gone from memory, not yet from disk
    QUARANTINED = 4


class Directory:
    """Not thread-safe: the tier locks. Methods that do I/O say so and raise ``OSError``.

    Args:
        disk: System calls. folder: Made if it is not there. layout: Sizes of a slot. count: Slots, all allocated.
        crew: Moves records; this directory's alone. slots_per_file: How many slots a file has.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        layout: RecordLayout,
        count: int,
        *,
        crew: Crew,
        slots_per_file: int = SLOTS_PER_FILE,
    ) -> None:
        if count <= 0 or slots_per_file <= 0:
            raise ValueError(f"slots must be positive, got {count} ({slots_per_file} a file)")
        self.folder, self.layout, self.count = folder, layout, count
        self.failed: str | None = None  # why this drive serves no more
        self.io_errors = 0
        self.table = NameTable(disk, folder, count)
        self.slots = SlotFiles(disk, folder, layout, count, slots_per_file=slots_per_file, crew=crew)
        self.last_use: NDArray[np.int64] = np.zeros(count, np.int64)
        self.states: NDArray[np.uint8] = np.zeros(count, np.uint8)
        self.unwritten: set[int] = set()  # rows in memory that the disk has not got
        self._free: deque[int] = deque()  # ascending: chains lie together, and stay so lap after lap
        self._freed: list[int] = []  # since then
        self._slots_per_file = slots_per_file
        self._disk, self._crew = disk, crew
        self._lock_fd = -1

    # --- opening (I/O) ---

    def open(self) -> bool:
        """Lock, lay out what is missing, read the names; says whether the table was there.

        Raises:
            DirectoryOwned: Somebody else has it.
            WrongFormat: It was laid out for something else.
            OSError: The drive does not serve.
        """
        self._disk.make_folder(self.folder)
        self._lock_fd = self._disk.open(os.path.join(self.folder, "lock"), CREATE)
        if not self._disk.lock(self._lock_fd):
            raise DirectoryOwned(self.folder)
        self._check_format()
        had_table, had_slots = self.table.exists, self._disk.exists(self.slots.paths()[0])
        if not had_table and not had_slots:  # new: names first, so that slot files without them mean a loss
            self.table.create()
        self.slots.open()
        if had_table:
            had_table = self._load()
        elif had_slots:
            self._scan(range(self.count))
            self.table.create()
        self._settle()
        return had_table or not had_slots

    def close(self) -> None:
        """Give all descriptors back, the lock last, once nothing moves any more."""
        self._crew.stop()
        self.slots.close()
        self.table.close()
        if self._lock_fd >= 0:
            self._disk.close(self._lock_fd)
            self._lock_fd = -1

    # --- slots (no I/O) ---

    @property
    def free(self) -> int:
        """Slots that can be had."""
        return len(self._free) + len(self._freed)

    def take(self) -> int | None:
        """A slot to write: the next one in the order of the disk."""
        if not self.free:
            return None
        (slot,) = self.take_some(1)
        return slot

    def take_some(self, count: int) -> list[int]:
        """``take`` of several; so many are free."""
        slots: list[int] = []
        while len(slots) < count:
            if not self._free:  # once around: holes that have met since then are one
                self._free.extend(sorted(self._freed))
                self._freed.clear()
            slots += [self._free.popleft() for _ in range(min(count - len(slots), len(self._free)))]
        self.states[slots] = SlotState.WRITING
        return slots

    def move(self, slot: int, state: SlotState) -> None:
        """Give a slot another state."""
        self.states[slot] = state
        if state is SlotState.FREE:
            self._freed.append(slot)

    def stored(self, slots: list[int], used_s: int) -> None:
        """These were written and named."""
        self.states[slots] = SlotState.LIVE
        self.last_use[slots] = used_s

    def forget(self, slot: int, state: SlotState) -> None:
        """Take a slot's name away, in memory; ``write_names`` makes it so on disk."""
        self.table.clear(slot)
        self.unwritten.add(slot)
        self.states[slot] = state

    def live(self) -> NDArray[np.int64]:
        """Slots with a stored block."""
        return np.flatnonzero(self.states == SlotState.LIVE)

    def by_state(self) -> dict[SlotState, int]:
        """Slots by state."""
        counts = np.bincount(self.states, minlength=len(SlotState))
        return {state: int(counts[state]) for state in SlotState} | {SlotState.FREE: self.free}

    def belonging(self, field: str, value: bytes) -> list[int]:
        """Live slots whose name has ``value`` (16 bytes) as its ``tenant`` or ``root``."""
        live = self.live()
        same = np.frombuffer(self.table.rows[field][live].tobytes(), "<u8").reshape(-1, 2)
        return [int(slot) for slot in live[(same == np.frombuffer(value, "<u8")).all(axis=1)]]

    def due(self, step_s: int, limit: int) -> list[int]:
        """Live slots whose last use on disk is ``step_s`` behind, at most ``limit``."""
        on_disk = self.table.rows["last_use"].astype(np.int64)
        behind = (self.last_use - on_disk >= step_s) | (on_disk > self.last_use)  # the latter after a scan
        return [int(slot) for slot in np.flatnonzero(behind & (self.states == SlotState.LIVE))[:limit]]

    def release_left(self) -> None:
        """Slots whose names are durably gone are free."""
        for slot in np.flatnonzero(self.states == SlotState.LEAVING):
            self.move(int(slot), SlotState.FREE)

    def problems(self) -> list[str]:
        """What does not add up in memory."""
        free = {int(slot) for slot in np.flatnonzero(self.states == SlotState.FREE)}
        found = []
        if self.free != len(free) or {*self._free, *self._freed} != free:
            found.append(f"{self.folder}: {self.free} slots in the free lists, {len(free)} are free")
        named = {int(slot) for slot in np.flatnonzero(self.table.rows["magic"])}
        live = {int(slot) for slot in self.live()}
        if named != live:
            found.append(f"{self.folder}: slots {sorted(named ^ live)} are named or live, not both")
        return found

    # --- names and bytes on disk (I/O) ---

    def write_names(self, slots: Iterable[int] = (), *, sync: bool) -> None:
        """Bring these rows to disk, and those that wait."""
        rows = self.unwritten.union(slots)
        self.unwritten.difference_update(
            rows
        )  # before they are copied: what changes from here on waits again
        self.table.write(rows)
        if sync:
            self.table.sync()

    def scrub(self, slots: list[int]) -> None:
        """Overwrite these slots with zeros, durably: nothing of their blocks is left to be found by a scan."""
        zeros = aligned(1, self.layout.slot_bytes)[0]
        self.slots.overwrite(slots, zeros)
        self.slots.sync(slots)

    def disk_problems(self, *, deep: bool) -> list[str]:
        """What of the disk differs from what is accounted for. ``deep`` reads every live record's name."""
        found = []
        accounted, allocated = self.slots.accounted_bytes(), self.slots.allocated_bytes()
        if not accounted <= allocated <= accounted * 1.01 + (1 << 20):  # the file system's own blocks
            found.append(f"{self.folder}: {accounted} bytes accounted for, {allocated} allocated")
        differ = np.flatnonzero((self.table.on_disk() != self.table.in_memory()).any(axis=1))
        if wrong := {int(slot) for slot in differ} - self.unwritten:
            found.append(f"{self.folder}: names of slots {sorted(wrong)} differ on disk")
        if deep:
            names = self.slots.names([int(slot) for slot in self.live()])
            for slot, name in names.items():
                known = self.table.name(slot)
                if known is None or name is None or name.block_hash != known.block_hash:
                    found.append(f"{self.folder}: slot {slot} does not hold the block its name says")
        return found

    def _check_format(self) -> None:
        wanted = {
            "version": FORMAT_VERSION,
            "payload_bytes": self.layout.payload_bytes,
            "slot_bytes": self.layout.slot_bytes,
            "slots": self.count,
            "slots_per_file": self._slots_per_file,
        }
        path = os.path.join(self.folder, "format.json")
        if self._disk.exists(path):
            fd = self._disk.open(path, CREATE)
            try:
                text = np.zeros(self._disk.size(fd), np.uint8)
                read_fully(self._disk, fd, [text], 0)
            finally:
                self._disk.close(fd)
            try:
                found = json.loads(text.tobytes())
            except ValueError:
                found = None
            if found != wanted:
                raise WrongFormat(self.folder, found=found, wanted=wanted)
            return
        fd = self._disk.open(path + ".new", CREATE)
        try:
            write_fully(self._disk, fd, [memoryview(json.dumps(wanted).encode())], 0)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        self._disk.rename(path + ".new", path)

    def _load(self) -> bool:
        """Names from the table; its doubtful rows, or all of them, from the slots. Says whether it was usable."""
        try:
            doubtful = self.table.load()
        except OSError:
            self.table.close()
            self._scan(range(self.count))
            self.table.create()
            return False
        if doubtful:
            self._scan(doubtful)
            self.unwritten.update(doubtful)
        return True

    def _scan(self, slots: Iterable[int]) -> None:
        for slot, name in self.slots.names(list(slots)).items():
            if name is not None:
                self.table.set(slot, name._replace(last_use=UNKNOWN_USE))

    def _settle(self) -> None:
        """Finish deletions, keep one name of each block, sort slots into live and free."""
        rows = self.table.rows
        named = np.flatnonzero(rows["magic"])
        wrong = named[rows["payload_bytes"][named] != self.layout.payload_bytes]
        deleted = named[(rows["flags"][named] & DELETED) != 0].tolist()
        for slot in wrong.tolist():
            self.forget(slot, SlotState.FREE)
        for slot in self._duplicates(np.setdiff1d(np.flatnonzero(rows["magic"]), deleted)):
            self.forget(slot, SlotState.FREE)
        if deleted:
            self.scrub(deleted)
            for slot in deleted:
                self.forget(slot, SlotState.FREE)
        live = np.flatnonzero(rows["magic"])
        self.states[live] = SlotState.LIVE
        self.last_use[live] = rows["last_use"][live]
        if self.unwritten:
            self.write_names(sync=True)
        self._free.extend(np.flatnonzero(self.states == SlotState.FREE).tolist())

    def _duplicates(self, slots: NDArray[np.int64]) -> list[int]:
        """Slots whose block another slot holds in a better copy."""
        best: dict[bytes, int] = {}
        worse = []
        hashes = self.table.rows["block_hash"][slots].tobytes()
        for at, slot in enumerate(slots.tolist()):
            block_hash = hashes[BLOCK_HASH_BYTES * at : BLOCK_HASH_BYTES * (at + 1)]
            rival = best.setdefault(block_hash, slot)
            if rival == slot:
                continue
            name, other = self.table.name(slot), self.table.name(rival)
            assert name is not None, f"slot {slot} lost its name"
            assert other is not None, f"slot {rival} lost its name"
            if preferred(name, other):
                best[block_hash] = slot
            worse.append(rival if best[block_hash] == slot else slot)
        return worse


def preferred(name: Name, other: Name) -> bool:
    """Which of two names of one block stays: the exact one, else the later."""
    return (name.exact, name.sequence) > (other.exact, other.sequence)
