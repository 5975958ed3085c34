"""Slot files: places of one size, allocated once, read and written past the page cache.

Neighbours go in one system call: preadv and pwritev take scattered buffers, so slots side by side on disk join
wherever their pages lie in memory. Several calls run at once in a pool of threads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

import numpy as np
from epdserve.kvstore.ssd.disk import DIRECT, Bytes, Disk, read_fully, write_fully
from epdserve.kvstore.ssd.record import ALIGNMENT, Chunks, Name, RecordLayout, name_in_record

RUN_BYTES: Final = (
    2 << 20
)  # longest joined transfer: long enough for the disk, short enough for several threads

_HANDFUL_SLOTS: Final = 4


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


_Call = Callable[[Disk, int, Sequence[Bytes], int], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Slots side by side in one file, with the bytes of each."""

    file: int
    first: int  # within the file
    slots: tuple[int, ...]
    chunks: tuple[Chunks, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """Runs on their way to disk or from it, one after the other. ``failed()`` waits, and says what failed, by slot."""

    runs: tuple[Run, ...]
    failed: Callable[[], dict[int, OSError]]

    def items(self) -> Iterator[tuple[int, Chunks]]:
        """Each slot with its bytes."""
        for run in self.runs:
            yield from zip(run.slots, run.chunks, strict=True)


def join(items: Iterable[tuple[int, Chunks]], *, slots_per_file: int, max_slots: int) -> list[Run]:
    """Few long runs out of (slot, chunks) pairs. Pure."""
    runs: list[list[tuple[int, Chunks]]] = []
    for slot, chunks in sorted(items, key=lambda item: item[0]):
        last = runs[-1] if runs else None
        if last is None or slot != last[-1][0] + 1 or slot % slots_per_file == 0 or len(last) == max_slots:
            runs.append([])
        runs[-1].append((slot, chunks))
    return [
        Run(
            run[0][0] // slots_per_file,
            run[0][0] % slots_per_file,
            tuple(slot for slot, _ in run),
            tuple(chunks for _, chunks in run),
        )
        for run in runs
    ]


class SlotFiles:
    """The slot files of one directory. Thread-safe; two writers of one slot are the caller's bug.

    Args:
        disk: System calls. folder: Where the files are. layout: Sizes of a slot. count: Slots in all.
        slots_per_file: The last file may have fewer. pool: Runs transfers side by side; None does one after
            the other in the caller's thread.
    """

    def __init__(
        self,
        disk: Disk,
        folder: str,
        layout: RecordLayout,
        count: int,
        *,
        slots_per_file: int,
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self.layout, self.count, self._per_file = layout, count, slots_per_file
        self._disk, self._folder, self._pool = disk, folder, pool
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

    def begin_read(self, items: Sequence[tuple[int, Bytes]]) -> list[Flight]:
        """Start to fill each slot's buffer (aligned, ``slot_bytes`` long). Without threads: filled when it returns."""
        return self._begin(read_fully, _single(items), 0)

    def write(self, items: Sequence[tuple[int, Chunks]]) -> dict[int, OSError]:
        """Write each slot from its chunks; returns what failed, by slot. Not durable before ``sync``."""
        return landed(self.begin_write(items))

    def begin_write(self, items: Sequence[tuple[int, Chunks]]) -> list[Flight]:
        """``write``, but returns once it is under way (without threads: done)."""
        return self._begin(write_fully, items, 0)

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
        batch = 64
        ends = aligned(batch, self.layout.end_bytes)
        for start in range(0, len(slots), batch):
            part = slots[start : start + batch]
            items = list(zip(part, ends, strict=False))
            failed = landed(self._begin(read_fully, _single(items), self.layout.end_offset, joined=False))
            for slot, end in items:
                if slot not in failed:
                    found[slot] = name_in_record(end, self.layout)
        return found

    def _file_bytes(self, number: int) -> int:
        first = number * self._per_file
        return min(self._per_file, self.count - first) * self.layout.slot_bytes

    def _begin(
        self, call: _Call, items: Iterable[tuple[int, Chunks]], offset: int, *, joined: bool = True
    ) -> list[Flight]:
        runs = join(items, slots_per_file=self._per_file, max_slots=self._max_slots if joined else 1)
        flights = []
        for some in _handfuls(runs):
            if self._pool is None:
                flights.append(Flight(some, partial(dict, self._runs(call, some, offset))))
            else:
                flights.append(Flight(some, self._pool.submit(self._runs, call, some, offset).result))
        return flights

    def _runs(self, call: _Call, runs: Iterable[Run], offset: int) -> dict[int, OSError]:
        failed: dict[int, OSError] = {}
        for run in runs:
            failed.update(self._run(call, run, offset))
        return failed

    def _run(self, call: _Call, run: Run, offset: int) -> dict[int, OSError]:
        fd, stride = self._fds[run.file], self.layout.slot_bytes
        try:
            call(self._disk, fd, list(chain.from_iterable(run.chunks)), run.first * stride + offset)
        except OSError as error:
            if len(run.slots) == 1:
                return {run.slots[0]: error}
        else:
            return {}
        failed: dict[int, OSError] = {}  # one slot at a time tells which of them is to blame
        for slot, chunks in zip(run.slots, run.chunks, strict=True):
            try:
                call(self._disk, fd, chunks, slot % self._per_file * stride + offset)
            except OSError as error:
                failed[slot] = error
        return failed


def _single(items: Iterable[tuple[int, Bytes]]) -> list[tuple[int, Chunks]]:
    return [(slot, (buffer,)) for slot, buffer in items]


def _handfuls(runs: Sequence[Run]) -> Iterator[tuple[Run, ...]]:
    """Short runs together: to hand one to a thread costs as much as to read a block."""
    some: list[Run] = []
    for run in runs:
        if some and sum(len(one.slots) for one in some) + len(run.slots) > _HANDFUL_SLOTS:
            yield tuple(some)
            some = []
        some.append(run)
    if some:
        yield tuple(some)


def landed(flights: Iterable[Flight]) -> dict[int, OSError]:
    """Wait for all of them; what failed, by slot."""
    failed: dict[int, OSError] = {}
    for flight in flights:
        failed.update(flight.failed())
    return failed
