"""Slot files: places of one size, allocated once, read and written past the page cache.

Neighbours go in one system call: preadv and pwritev take scattered buffers, so slots side by side on disk join
wherever their pages lie in memory. Several calls run at once, by a ``Crew``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from epdserve.kvstore.native import crc32c_of
from epdserve.kvstore.ssd.crew import Crew, Landing, Run
from epdserve.kvstore.ssd.disk import DIRECT, Bytes, Disk, read_fully, write_fully
from epdserve.kvstore.ssd.record import ALIGNMENT, Name, RecordLayout, name_in_record

RUN_BYTES: Final = (
    2 << 20
)  # longest joined transfer: long enough for the disk, short enough for several threads
_SCAN_SLOTS: Final = 64
_SHORT_SLOTS: Final = 4  # shorter runs cost more than another thread is worth


def aligned(count: int, nbytes: int) -> Bytes:
    """``count`` buffers of ``nbytes`` on page boundaries, as (count, nbytes); zero, unpaged until touched."""
    return np.frombuffer(mmap.mmap(-1, max(1, count * nbytes)), np.uint8)[: count * nbytes].reshape(
        count, nbytes
    )


def is_aligned(buffer: Bytes) -> bool:
    """Whether direct I/O may use the buffer."""
    about = (
        buffer.__array_interface__
    )  # some microseconds faster than ``ctypes``; None: no strides, contiguous
    return about["strides"] is None and about["data"][0] % ALIGNMENT == 0


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of slots, by their number in the order in which they were given."""

    errors: dict[int, OSError]
    crcs: list[int]  # of each record that was read


Flight = Callable[[], Landed]  # slots on their way; waits for all of them


def neighbours(slots: Sequence[int], *, slots_per_file: int, max_slots: int) -> list[range]:
    """Few long runs of ascending slots, each as places in ``slots``. Pure."""
    runs, start = [], 0
    for at in range(1, len(slots) + 1):
        over = at == len(slots) or slots[at] != slots[at - 1] + 1 or slots[at] % slots_per_file == 0
        if over or at - start == max_slots:
            runs.append(range(start, at))
            start = at
    return runs if slots else []


class SlotFiles:
    """The slot files of one directory. Thread-safe; two writers of one slot are the caller's bug.

    Args:
        disk: System calls. folder: Where the files are. layout: Sizes of a slot. count: Slots in all.
        slots_per_file: The last file may have fewer. crew: Moves records.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        layout: RecordLayout,
        count: int,
        *,
        slots_per_file: int,
        crew: Crew,
    ) -> None:
        self.layout, self.count, self._per_file = layout, count, slots_per_file
        self._disk, self._folder, self._crew = disk, folder, crew
        self._fds: list[int] = []
        self._max_slots = max(1, RUN_BYTES // layout.slot_bytes)

    def paths(self) -> list[str]:
        """The files, in order."""
        files = -(-self.count // self._per_file)
        return [os.path.join(self._folder, f"slots-{number:04}.dat") for number in range(files)]

    def open(self) -> None:
        """Open every file and allocate what is missing of it.

        Raises:
            OSError: ENOSPC where the disk has no room, or whatever the system says.
        """
        grown = False
        for number, path in enumerate(self.paths()):
            self._fds.append(fd := self._disk.open(path, DIRECT))
            nbytes = self._file_bytes(number)
            if self._disk.size(fd) != nbytes or self._disk.allocated(fd) < nbytes:
                self._disk.allocate(fd, nbytes)
                grown = True
        if grown:  # a block must not be durable in a file that is not
            self._disk.sync_folder(self._folder)

    def close(self) -> None:
        """Give the descriptors back."""
        while self._fds:
            self._disk.close(self._fds.pop())

    def allocated_bytes(self) -> int:
        """What the file system says it set aside."""
        return sum(self._disk.allocated(fd) for fd in self._fds)

    def accounted_bytes(self) -> int:
        """What the tier believes it has."""
        return self.count * self.layout.slot_bytes

    @property
    def run_slots(self) -> int:
        """Slots that go in one transfer if they lie side by side."""
        return self._max_slots

    def begin_read(self, slots: Sequence[int], records: Sequence[Bytes]) -> Flight:
        """Start to fill each slot's buffer (aligned, ``slot_bytes`` long) and to sum its crc32c."""
        return self._begin_read(slots, records, 0, self.layout.covered_bytes, self._max_slots)

    def begin_write(self, slots: Sequence[int], bodies: Sequence[Bytes], ends: Sequence[Bytes]) -> Flight:
        """Start to seal records and to write each into its slot. Not durable before ``sync``.

        Args:
            slots: Where. bodies: What begins each record, perhaps with more behind it. ends: Its last ``end_bytes``.
        """
        order = _ascending(slots)
        ordered, split = [slots[at] for at in order], self.layout.end_offset
        ends = [ends[at] for at in order]
        bodies = [bodies[at] for at in order] if split else ends
        each = max(_SHORT_SLOTS, -(-len(slots) // self._crew.width))  # a few slots are for all of the crew
        runs = self._runs(ordered, 0, min(each, self._max_slots))
        landing = self._crew.write(runs, bodies, split, ends, self.layout.covers_of_end)

        def again(at: int, fd: int, offset: int) -> None:
            chunks = (bodies[at][:split], ends[at]) if split else (ends[at],)
            write_fully(self._disk, fd, chunks, offset)

        return partial(self._land, order, runs, landing, again)

    def overwrite(self, slots: Iterable[int], content: Bytes) -> None:
        """Write the same bytes into each slot. Not durable before ``sync``.

        Raises:
            OSError: It is unknown which slots hold them.
        """
        for run in self._runs(sorted(slots), 0, self._max_slots):
            write_fully(self._disk, run.fd, [content] * len(run.records), run.offset)

    def sync(self, slots: Iterable[int]) -> None:
        """Make these slots survive a power cut.

        Raises:
            OSError: Nothing is known of any of them.
        """
        for file in sorted({slot // self._per_file for slot in slots}):
            self._disk.sync(self._fds[file])

    def names(self, slots: Sequence[int]) -> dict[int, Name | None]:
        """Scan: the name each slot's record gives itself; a slot that cannot be read is left out."""
        found: dict[int, Name | None] = {}
        ends = list(aligned(_SCAN_SLOTS, self.layout.end_bytes))
        for start in range(0, len(slots), _SCAN_SLOTS):
            part = slots[start : start + _SCAN_SLOTS]
            failed = self._begin_read(part, ends[: len(part)], self.layout.end_offset, 0, 1)().errors
            for at, slot in enumerate(part):
                if at not in failed:
                    found[slot] = name_in_record(ends[at], self.layout)
        return found

    def _file_bytes(self, number: int) -> int:
        first = number * self._per_file
        return min(self._per_file, self.count - first) * self.layout.slot_bytes

    def _runs(self, slots: Sequence[int], offset: int, max_slots: int) -> list[Run]:
        """Runs over ascending slots, from ``offset`` in each."""
        runs = []
        for records in neighbours(slots, slots_per_file=self._per_file, max_slots=max_slots):
            file, within = divmod(slots[records.start], self._per_file)
            runs.append(Run(self._fds[file], within * self.layout.slot_bytes + offset, records))
        return runs

    def _begin_read(
        self, slots: Sequence[int], records: Sequence[Bytes], offset: int, covers: int, max_slots: int
    ) -> Flight:
        order = _ascending(slots)
        buffers = [records[at] for at in order]
        runs = self._runs([slots[at] for at in order], offset, max_slots)
        landing = self._crew.read(runs, buffers, covers)

        def again(at: int, fd: int, offset: int) -> int:
            read_fully(self._disk, fd, [buffers[at]], offset)
            return crc32c_of([buffers[at]], covers)[0]

        return partial(self._land, order, runs, landing, again)

    def _land(
        self,
        order: Sequence[int],
        runs: Sequence[Run],
        landing: Landing,
        again: Callable[[int, int, int], int | None],
    ) -> Landed:
        """Wait; of a run that failed, one slot at a time tells which of them is to blame."""
        moved = landing()
        errors, crcs = dict[int, OSError](), moved.crcs
        for run, number in zip(runs, moved.errors, strict=True):
            if number and len(run.records) == 1:
                errors[order[run.records.start]] = OSError(number, os.strerror(number))
            elif number:
                for place, at in enumerate(run.records):
                    try:
                        crc = again(at, run.fd, run.offset + place * self.layout.slot_bytes)
                    except OSError as error:
                        errors[order[at]] = error
                    else:
                        crcs[at : at + 1] = [] if crc is None else [crc]
        if crcs and not isinstance(order, range):
            crcs = [crc for _, crc in sorted(zip(order, crcs, strict=True))]
        return Landed(errors, crcs)


def _ascending(slots: Sequence[int]) -> Sequence[int]:
    """Places of slots in the order of the disk."""
    if all(one <= other for one, other in pairwise(slots)):
        return range(len(slots))
    return sorted(range(len(slots)), key=slots.__getitem__)
