"""Byte work on many blocks in one call, without Python's lock where the native module was built.

``native.c`` is built when the package is installed on x86-64 with a C compiler; without it the same comes from numpy
and google-crc32c, a block at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_VERSION: Final = 3  # of native.c: a module left over from another version is not used
_HEADER_REST: Final = 32  # of a block header: its crc32c and what follows; its first 32 bytes are covered
_NAME_BYTES, _NAME_CRC_OF_RECORD, _NAME_CRC = 128, 104, 124  # ``ssd/record.py`` has the table


def _load() -> ModuleType | None:
    try:
        module = importlib.import_module("epdserve.kvstore._native")
    except ImportError:
        return None
    return module if module.VERSION == _VERSION else None


_native: Final = _load()


def native() -> ModuleType | None:
    """The native module, where it was built: for what has no like in Python (``ssd/crew.py``)."""
    return _native


def copy_pages(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copy buffers of equal length; long ones on 32-byte boundaries bypass the caches on their way out.

    Raises:
        ValueError: Number or lengths differ. Without the native module, some may have been copied.
    """
    if _native is not None:
        _native.copy_pages(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def crc32c_of(buffers: Sequence[Bytes], count: int) -> list[int]:
    """crc32c of the first ``count`` bytes of each buffer.

    Raises:
        ValueError: A buffer is shorter.
    """
    if _native is not None:
        found: list[int] = _native.crc32c(buffers, count)
        return found
    _require_lengths(buffers, count)
    return [int(google_crc32c.value(buffer[:count])) for buffer in buffers]


def seal_records(bodies: Sequence[Bytes], split: int, ends: Sequence[Bytes], covers: int) -> None:
    """Fill in the crc32c of SSD records and of the names in them: three fields of each end.

    Args:
        bodies: Leading bytes of each record, of which ``split`` are covered. ends: What follows them: ``covers`` bytes
            of payload and header, then the header's other 32 bytes, then the name.
        split: Bytes. covers: Bytes.

    Raises:
        ValueError: Not as many ends as bodies, or one that is too short.
    """
    if _native is not None:
        _native.seal(bodies, split, ends, covers)
        return
    _require_lengths(bodies, split)
    _require_lengths(ends, covers + _HEADER_REST + _NAME_BYTES)
    for body, end in zip(bodies, ends, strict=True):
        crc = google_crc32c.extend(google_crc32c.value(body[:split]), end[:covers].tobytes())
        name = end[covers + _HEADER_REST : covers + _HEADER_REST + _NAME_BYTES].data
        end[covers : covers + 4].data[:] = name[_NAME_CRC_OF_RECORD : _NAME_CRC_OF_RECORD + 4] = crc.to_bytes(
            4, "little"
        )
        name[_NAME_CRC:] = google_crc32c.value(name[:_NAME_CRC].tobytes()).to_bytes(4, "little")


def gather(buffers: Sequence[Bytes], offset: int, count: int) -> bytes:
    """The ``count`` bytes from ``offset`` on of each buffer, one after the other.

    Raises:
        ValueError: A buffer is shorter.
    """
    if _native is not None:
        found: bytes = _native.gather(buffers, offset, count)
        return found
    _require_lengths(buffers, offset + count)
    return b"".join([buffer[offset : offset + count].tobytes() for buffer in buffers])


def all_aligned(buffers: Sequence[Bytes], boundary: int) -> bool:
    """Whether each (contiguous) buffer begins at a multiple of ``boundary`` bytes."""
    if _native is not None:
        found: bool = _native.aligned(buffers, boundary)
        return found
    return all(buffer.__array_interface__["data"][0] % boundary == 0 for buffer in buffers)


def _require_lengths(buffers: Sequence[Bytes], at_least: int) -> None:
    for buffer in buffers:
        if buffer.nbytes < at_least:
            raise ValueError(f"{at_least} bytes of a buffer of {buffer.nbytes}")
