"""The system calls of the SSD tier, as one small object: tests put one in its place that cuts, tears and fails."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Chunk = Bytes | memoryview

CREATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
DIRECT = CREATE | os.O_DIRECT


class Disk(Protocol):
    """What the tier asks of the operating system. Every method may raise ``OSError``. Thread-safe."""

    def open(self, path: str, flags: int) -> int:
        """A file descriptor."""

    def close(self, fd: int) -> None:
        """Give a descriptor back, and with it its lock."""

    def lock(self, fd: int) -> bool:
        """Take the file's exclusive lock if nobody has it; it ends with the descriptor or the process."""

    def size(self, fd: int) -> int:
        """Length of the file in bytes."""

    def allocated(self, fd: int) -> int:
        """Bytes the file system set aside for the file."""

    def allocate(self, fd: int, nbytes: int) -> None:
        """Set ``nbytes`` aside, zero where nothing was written, so that later writes find room."""

    def read(self, fd: int, chunks: Sequence[Chunk], offset: int) -> int:
        """preadv: how many bytes came, perhaps fewer than asked."""

    def write(self, fd: int, chunks: Sequence[Chunk], offset: int) -> int:
        """pwritev: how many bytes went, perhaps fewer than asked."""

    def sync(self, fd: int) -> None:
        """fdatasync: what was written before survives a power cut."""

    def rename(self, old: str, new: str) -> None:
        """Give a file its name, in one step, and make the name durable."""

    def sync_folder(self, path: str) -> None:
        """Make the names of the files in a folder durable."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    def make_folder(self, path: str) -> None:
        """Create a folder unless it is there."""


class SystemDisk:
    """The real thing."""

    def open(self, path: str, flags: int) -> int:
        """A file descriptor."""
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Give a descriptor back, and with it its lock."""
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Take the file's exclusive lock if nobody has it; it ends with the descriptor or the process."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def size(self, fd: int) -> int:
        """Length of the file in bytes."""
        return os.fstat(fd).st_size

    def allocated(self, fd: int) -> int:
        """Bytes the file system set aside for the file."""
        return os.fstat(fd).st_blocks * 512

    def allocate(self, fd: int, nbytes: int) -> None:
        """Set ``nbytes`` aside, zero where nothing was written, so that later writes find room."""
        os.posix_fallocate(fd, 0, nbytes)

    def read(self, fd: int, chunks: Sequence[Chunk], offset: int) -> int:
        """preadv: how many bytes came, perhaps fewer than asked."""
        return os.preadv(fd, _buffers(chunks), offset)

    def write(self, fd: int, chunks: Sequence[Chunk], offset: int) -> int:
        """pwritev: how many bytes went, perhaps fewer than asked."""
        return os.pwritev(fd, _buffers(chunks), offset)

    def sync(self, fd: int) -> None:
        """fdatasync: what was written before survives a power cut."""
        os.fdatasync(fd)

    def rename(self, old: str, new: str) -> None:
        """Give a file its name, in one step, and make the name durable."""
        os.rename(old, new)
        self.sync_folder(os.path.dirname(new))

    def sync_folder(self, path: str) -> None:
        """Make the names of the files in a folder durable."""
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return os.path.exists(path)

    def make_folder(self, path: str) -> None:
        """Create a folder unless it is there."""
        os.makedirs(path, exist_ok=True)


def read_fully(disk: Disk, fd: int, chunks: Sequence[Chunk], offset: int) -> None:
    """Read until every chunk is full.

    Raises:
        OSError: Of the system, or EIO where the file ends early.
    """
    _fully(disk.read, fd, chunks, offset)


def write_fully(disk: Disk, fd: int, chunks: Sequence[Chunk], offset: int) -> None:
    """Write until every chunk is down.

    Raises:
        OSError: Of the system, or EIO where nothing more is taken.
    """
    _fully(disk.write, fd, chunks, offset)


def _fully(call: Any, fd: int, chunks: Sequence[Chunk], offset: int) -> None:
    rest = list(chunks)
    while rest:
        done = call(fd, rest, offset)
        if done <= 0:
            raise OSError(errno.EIO, f"no bytes at offset {offset}")
        offset += done
        while rest and done >= rest[0].nbytes:
            done -= rest.pop(0).nbytes
        if done:
            rest[0] = rest[0][done:]


def _buffers(chunks: Sequence[Chunk]) -> list[memoryview]:
    return [chunk if isinstance(chunk, memoryview) else chunk.data for chunk in chunks]
