"""Who moves records: native threads that never ask for Python's lock, or a disk's calls one by one.

A thread of Python that does I/O needs Python's lock to begin its next call, and waits for it while another thread
computes. Native threads never do: one call begins many runs, with their crc32c, and one waits for all of them.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from epdserve.kvstore.native import crc32c_of, native, seal_records
from epdserve.kvstore.ssd.disk import Bytes, Disk, SystemDisk, read_fully, write_fully

_HANDFUL_RECORDS: Final = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Records side by side in a file."""

    fd: int
    offset: int  # bytes
    records: range  # of the batch


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a batch."""

    errors: list[int]  # errno of each run, 0 where every byte went
    crcs: list[int]  # of each record that was read; of a run that failed, anything


Landing = Callable[[], Moved]  # waits for what was begun; buffers must stay as they are until it returns


class Crew(Protocol):
    """Thread-safe. Runs hold the batch's records in order, each record once."""

    @property
    def width(self) -> int:
        """How many runs it moves at the same time."""

    def write(
        self, runs: Sequence[Run], bodies: Sequence[Bytes], split: int, ends: Sequence[Bytes], covers: int
    ) -> Landing:
        """Begin to seal records (``seal_records``) and to write each: ``split`` bytes of its body, then its end."""

    def read(self, runs: Sequence[Run], records: Sequence[Bytes], covers: int) -> Landing:
        """Begin to fill records, and to sum the first ``covers`` bytes of each."""

    def stop(self) -> None:
        """End its threads after what was begun. Nothing can be begun any more."""


def crew_of(disk: Disk, threads: int) -> Crew:
    """Native threads where they would do what the disk does; any other disk is to see each call.

    Args:
        disk: System calls. threads: How many; 0 does everything in the caller's thread before ``write`` or ``read``
            returns.
    """
    if threads and type(disk) is SystemDisk and native() is not None:
        return NativeCrew(threads)
    return DiskCrew(disk, threads)


class NativeCrew:
    """``Crew`` of native threads.

    Raises:
        OSError: Not one thread could be started.
    """

    def __init__(self, threads: int) -> None:
        module = native()
        if module is None:
            raise RuntimeError("there is no native code here")
        self._native, self._threads = module, threads
        self._crew: Final = module.crew(threads)

    @property
    def width(self) -> int:
        """See ``Crew.width``."""
        return max(1, self._threads)

    def write(
        self, runs: Sequence[Run], bodies: Sequence[Bytes], split: int, ends: Sequence[Bytes], covers: int
    ) -> Landing:
        """See ``Crew.write``."""
        ticket = self._native.begin_write(self._crew, *_columns(runs), bodies, split, ends, covers)
        return partial(self._finish, ticket)

    def read(self, runs: Sequence[Run], records: Sequence[Bytes], covers: int) -> Landing:
        """See ``Crew.read``."""
        return partial(self._finish, self._native.begin_read(self._crew, *_columns(runs), records, covers))

    def stop(self) -> None:
        """See ``Crew.stop``."""
        self._native.stop(self._crew)

    def _finish(self, ticket: Any) -> Moved:
        return Moved(*self._native.finish(ticket))


class DiskCrew:
    """``Crew`` that makes a disk's calls, in threads of Python or in its caller's."""

    def __init__(self, disk: Disk, threads: int) -> None:
        self._disk, self._threads = disk, threads
        self._pool = ThreadPoolExecutor(threads, "ssd") if threads else None

    @property
    def width(self) -> int:
        """See ``Crew.width``."""
        return max(1, self._threads)

    def write(
        self, runs: Sequence[Run], bodies: Sequence[Bytes], split: int, ends: Sequence[Bytes], covers: int
    ) -> Landing:
        """See ``Crew.write``."""

        def work(run: Run) -> None:
            some = [bodies[at] for at in run.records], [ends[at] for at in run.records]
            seal_records(some[0], split, some[1], covers)
            pairs = zip(*some, strict=True)
            chunks = [chunk for body, end in pairs for chunk in ((body[:split], end) if split else (end,))]
            write_fully(self._disk, run.fd, chunks, run.offset)

        return self._begin(runs, work, list)

    def read(self, runs: Sequence[Run], records: Sequence[Bytes], covers: int) -> Landing:
        """See ``Crew.read``."""

        def work(run: Run) -> None:
            read_fully(self._disk, run.fd, [records[at] for at in run.records], run.offset)

        return self._begin(runs, work, lambda: crc32c_of(records, covers))

    def stop(self) -> None:
        """See ``Crew.stop``."""
        if self._pool is not None:
            self._pool.shutdown()

    def _begin(
        self, runs: Sequence[Run], work: Callable[[Run], None], sums: Callable[[], list[int]]
    ) -> Landing:
        parts: list[Callable[[], list[int]]] = []
        for some in _handfuls(runs):
            if self._pool is None:
                parts.append(partial(list, _errors(some, work)))
            else:
                parts.append(self._pool.submit(_errors, some, work).result)
        if self._pool is not None:
            time.sleep(0)  # lets go of Python's lock: a thread cannot begin without it
        return lambda: Moved([error for part in parts for error in part()], sums())


def _errors(runs: Sequence[Run], work: Callable[[Run], None]) -> list[int]:
    """The errno of each run."""
    found = []
    for run in runs:
        try:
            work(run)
        except OSError as error:
            found.append(error.errno or errno.EIO)
        else:
            found.append(0)
    return found


def _columns(runs: Sequence[Run]) -> tuple[list[int], list[int], list[int]]:
    return [run.fd for run in runs], [run.offset for run in runs], [len(run.records) for run in runs]


def _handfuls(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Short runs together: to hand one to a thread costs as much as to read a block."""
    some: list[Run] = []
    for run in runs:
        if some and sum(len(one.records) for one in some) + len(run.records) > _HANDFUL_RECORDS:
            yield some
            some = []
        some.append(run)
    if some:
        yield some
