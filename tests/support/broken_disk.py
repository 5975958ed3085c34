"""A disk that stops at a chosen system call, forgets what was not synced, fails, tears and reads short."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence

from epdserve.kvstore.ssd.disk import Chunk, SystemDisk

SECTOR = 512


class PowerCut(BaseException):
    """The process is gone: nothing of it runs on."""


class BrokenDisk(SystemDisk):
    """Real files under faults.

    ``cut_at``: the call of this number (from 0) does not return; a write among them gets down in part. ``forgetful``:
    of what was written and not synced by then, every sector is lost or kept by chance, and so are new files whose
    folder was not synced. ``fault(operation, path,
    offset)`` may give an error to raise. ``short``: reads and writes do a sector-aligned part of what they are asked.
    """

    def __init__(
        self,
        *,
        cut_at: int | None = None,
        forgetful: bool = False,
        seed: int = 0,
        fault: Callable[[str, str, int], int | None] = lambda *_: None,
        short: bool = False,
    ) -> None:
        self.calls = 0
        self.cut_at, self.fault, self.short = cut_at, fault, short
        self._forgetful, self._random = forgetful, random.Random(seed)
        self._paths: dict[int, str] = {}
        self._unsynced: list[tuple[str, int, bytes]] = []  # what stood there before, oldest first
        self._unnamed: set[str] = set()  # new files whose folder was not synced since
        self._dead = False

    def open(self, path: str, flags: int) -> int:
        self._step("open", path)
        if self._forgetful and not os.path.exists(path):
            self._unnamed.add(path)
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        if fd in self._paths:
            del self._paths[fd]
            super().close(fd)

    def lock(self, fd: int) -> bool:
        self._step("lock", self._paths.get(fd, ""))
        return super().lock(fd)

    def size(self, fd: int) -> int:
        self._step("size", self._paths.get(fd, ""))
        return super().size(fd)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._step("allocate", self._paths.get(fd, ""))
        super().allocate(fd, nbytes)

    def read(self, fd: int, chunks: Sequence[Chunk], offset: int) -> int:
        self._step("read", self._paths.get(fd, ""), offset)
        return super().read(fd, self._some(chunks), offset)

    def write(self, fd: int, chunks: Sequence[Chunk], offset: int) -> int:
        path = self._paths.get(fd, "")
        data = b"".join(bytes(chunk) for chunk in chunks)
        if self.calls == self.cut_at and not self._dead:
            sectors = self._random.randint(0, len(data) // SECTOR)
            self._put(path, data[: sectors * SECTOR], offset)
        self._step("write", path, offset)
        if self._forgetful:
            self._unsynced.append((path, offset, _peek(path, offset, len(data))))
        return super().write(fd, self._some(chunks), offset)

    def sync(self, fd: int) -> None:
        path = self._paths.get(fd, "")
        self._step("sync", path)  # the real call would prove nothing here and takes its time
        self._unsynced = [entry for entry in self._unsynced if entry[0] != path]

    def rename(self, old: str, new: str) -> None:
        self._step("rename", new)
        os.rename(old, new)
        moved = [(new if path == old else path, at, data) for path, at, data in self._unsynced]
        self._paths = {fd: new if path == old else path for fd, path in self._paths.items()}
        self._unsynced = moved
        self._name_all(os.path.dirname(new))

    def sync_folder(self, path: str) -> None:
        self._step("sync_folder", path)
        self._name_all(path)

    def exists(self, path: str) -> bool:
        self._step("exists", path)
        return super().exists(path)

    def make_folder(self, path: str) -> None:
        self._step("make_folder", path)
        super().make_folder(path)

    def _step(self, operation: str, path: str, offset: int = 0) -> None:
        if self._dead:
            raise PowerCut
        self.calls += 1
        if self.calls - 1 == self.cut_at:
            self._die()
            raise PowerCut
        number = self.fault(operation, path, offset)
        if number is not None:
            raise OSError(number, os.strerror(number), path)

    def _die(self) -> None:
        self._dead = True
        for path, offset, before in reversed(self._unsynced):
            for start in range(0, len(before), SECTOR):
                if self._random.random() < 0.5:
                    _poke(path, before[start : start + SECTOR], offset + start)
        for path in sorted(self._unnamed):
            if self._random.random() < 0.5:
                os.unlink(path)
        for fd in list(self._paths):
            self.close(fd)

    def _name_all(self, folder: str) -> None:
        self._unnamed = {path for path in self._unnamed if os.path.dirname(path) != folder}

    def _put(self, path: str, data: bytes, offset: int) -> None:
        if self._forgetful:
            self._unsynced.append((path, offset, _peek(path, offset, len(data))))
        _poke(path, data, offset)

    def _some(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        if self.short and len(chunks) > 1:
            return chunks[: len(chunks) // 2]
        return chunks


def fails(
    operation: str, part_of_path: str, number: int = errno.EIO
) -> Callable[[str, str, int], int | None]:
    """A fault: every such call on such a file."""
    return lambda did, path, _: number if did == operation and part_of_path in path else None


def flip(path: str, offset: int, bit: int = 0) -> None:
    """Turn one bit over."""
    _poke(path, bytes([_peek(path, offset, 1)[0] ^ 1 << bit]), offset)


def _peek(path: str, offset: int, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(nbytes).ljust(nbytes, b"\0")


def _poke(path: str, data: bytes, offset: int) -> None:
    if data:
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(data)
