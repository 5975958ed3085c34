"""The table of names: one row of 128 bytes for each slot, rewritten in place. Little-endian.

offset        size  field
0             4     magic "EPKT"
4             4     version 1
8             8     slots
16            8     tier time, seconds, when this head was written
24            8     wall clock, seconds, at the same moment
32            28    reserved, zero
60            4     crc32c over the 60 bytes above; the rest of the first 4096 is zero
4096 + 128 i  128   name of slot i (``record.py``), or zeros where the slot is free

A row stands for exactly one slot, so no crash can leave two claims to a slot or a slot unaccounted for, nothing has
to be compacted, and a torn row spoils itself only: its slot is asked for its own name instead.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import google_crc32c
import numpy as np
from epdserve.kvstore.ssd.disk import CREATE, Bytes, Disk, read_fully, write_fully
from epdserve.kvstore.ssd.record import NAME_BYTES, NAME_DTYPE, Name, is_name
from numpy.typing import NDArray

HEAD_BYTES: Final = 4096
_MAGIC: Final = b"EPKT"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<4sIQQQ28x")
_FREE: Final = bytes(NAME_BYTES)
_READ_BYTES: Final = 4 << 20
_JOIN_GAP: Final = (
    8  # rows of untouched slots between two changed ones that are cheaper to write than to skip
)


class NameTable:
    """Names of one directory's slots, in memory and on disk. Not thread-safe: the tier locks.

    ``rows`` is what the disk shall hold; ``write`` brings it there.
    """

    def __init__(self, disk: Disk, folder: str, count: int) -> None:
        self.count = count
        self.rows: NDArray[np.void] = np.zeros(count, NAME_DTYPE)
        self.saved_time: tuple[int, int] | None = None  # tier time and wall clock of the head
        self.path = os.path.join(folder, "names.tbl")
        self._disk = disk
        self._bytes: Bytes = self.rows.view(np.uint8).reshape(count, NAME_BYTES)
        self._flat = self._bytes.reshape(-1).data
        self._fd = -1

    @property
    def exists(self) -> bool:
        """Whether the file is there; a directory without it is scanned."""
        return self._disk.exists(self.path)

    def create(self) -> None:
        """Put the file there as ``rows`` say: complete under its name, or not there at all."""
        new = self.path + ".new"
        self._fd = self._disk.open(new, CREATE)
        self._disk.allocate(self._fd, HEAD_BYTES + self.count * NAME_BYTES)
        self.write(range(self.count))
        self.sync()
        self._disk.rename(new, self.path)

    def load(self) -> list[int]:
        """Read the table; returns the slots whose row cannot be trusted (their ``rows`` are zero now).

        Raises:
            OSError: The table cannot be read; it counts as lost.
        """
        self._fd = self._disk.open(self.path, CREATE)
        wanted = HEAD_BYTES + self.count * NAME_BYTES
        if self._disk.size(self._fd) < wanted:  # cut off: what is missing reads as zeros, that is, as lost
            return self._cut_off(wanted)
        head = np.zeros(HEAD_BYTES, np.uint8)
        read_fully(self._disk, self._fd, [head], 0)
        self.saved_time = _decode_head(head[:64].tobytes(), self.count)
        flat = self._bytes.reshape(-1)
        for start in range(0, flat.nbytes, _READ_BYTES):
            read_fully(self._disk, self._fd, [flat[start : start + _READ_BYTES]], HEAD_BYTES + start)
        taken = np.flatnonzero(self._bytes.any(axis=1)).tolist()
        doubtful = [slot for slot in taken if not is_name(self._bytes[slot])]
        for slot in doubtful:
            self.clear(slot)
        return doubtful

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def name(self, slot: int) -> Name | None:
        """The slot's name, or None: free, or not to be trusted."""
        at = slot * NAME_BYTES
        return Name.of_row(bytes(self._flat[at : at + NAME_BYTES]))  # proven when loaded

    def set(self, slot: int, name: Name) -> None:
        """Name a slot, in memory."""
        self._flat[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = name.encode()

    def set_rows(self, slots: Sequence[int], names: NDArray[np.void]) -> None:
        """``set`` of many, each in its encoded form (``NAME_DTYPE``)."""
        self.rows[slots] = names

    def clear(self, slot: int) -> None:
        """Take a slot's name away, in memory."""
        self._bytes[slot] = 0

    def write(self, slots: Iterable[int]) -> None:
        """Bring these rows to disk, neighbours in one call. Durable after ``sync``.

        Raises:
            OSError: It is unknown which rows are there.
        """
        ordered = sorted(slots)
        start = 0
        for i in range(1, len(ordered) + 1):
            if i == len(ordered) or ordered[i] - ordered[i - 1] > _JOIN_GAP:
                first, last = ordered[start], ordered[i - 1]
                rows = self._bytes[first : last + 1].reshape(-1)
                write_fully(self._disk, self._fd, [rows], HEAD_BYTES + first * NAME_BYTES)
                start = i

    def write_head(self, tier_time_s: int, wall_s: int) -> None:
        """Note what time it is, for the next start."""
        fields = _HEAD.pack(_MAGIC, _VERSION, self.count, tier_time_s, wall_s)
        head = fields + google_crc32c.value(fields).to_bytes(4, "little")
        write_fully(self._disk, self._fd, [memoryview(head)], 0)

    def sync(self) -> None:
        """Make every write so far durable."""
        self._disk.sync(self._fd)

    def on_disk(self) -> Bytes:
        """Read all rows back, as (count, 128), for ``check``."""
        found = np.zeros(self.count * NAME_BYTES, np.uint8)
        read_fully(self._disk, self._fd, [found], HEAD_BYTES)
        return found.reshape(self.count, NAME_BYTES)

    def in_memory(self) -> Bytes:
        """The same rows as they should be."""
        return self._bytes.copy()

    def _cut_off(self, wanted: int) -> list[int]:
        self._disk.allocate(self._fd, wanted)
        return list(range(self.count))


def _decode_head(data: bytes, count: int) -> tuple[int, int] | None:
    """Tier time and wall clock of a head, or None where it was torn: then no time has passed."""
    fields = data[: _HEAD.size]
    if google_crc32c.value(fields) != int.from_bytes(data[_HEAD.size : _HEAD.size + 4], "little"):
        return None
    magic, version, slots, tier_time, wall = _HEAD.unpack(fields)
    if (magic, version, slots) != (_MAGIC, _VERSION, count):
        return None
    return int(tier_time), int(wall)
