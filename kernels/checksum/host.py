"""Checksums of pages in host memory, alone or while they are copied: native code where it was built, else numpy.

The native module (``native.c``) holds no lock of Python while it works, and costs about as much as reading the bytes
once. It is built when the package is installed on a machine with a C compiler, and runs on any processor of the
architecture it was built for; without it the same numbers come from ``twin.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Final

import numpy as np
from epdserve.kernels.checksum.twin import page_checksums_numpy
from epdserve.kernels.checksum.weights import WORD_BYTES, weights_numpy
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_VERSION: Final = 1  # of native.c: a module left over from another version is not used


def _load() -> ModuleType | None:
    try:
        module = importlib.import_module("epdserve.kernels.checksum._native")
    except ImportError:
        return None
    return module if module.VERSION == _VERSION else None


_native: Final = _load()
HOST_CHECKSUM_KERNEL: Final[str] = f"native, {_native.KERNEL}" if _native else "numpy"


@lru_cache(maxsize=8)
def _upper_weights(payload_bytes: int) -> NDArray[np.uint32]:
    """Upper halves of the weights; the lower ones are 2 * i + 1 and no table."""
    weights = weights_numpy(-(-payload_bytes // WORD_BYTES)).view(np.uint64)
    return (weights >> np.uint64(32)).astype(np.uint32)


def page_checksums_host(
    pages_PB: Bytes, page_ids: Sequence[int], payload_bytes: int, hashes: Sequence[bytes]
) -> list[int]:
    """Checksum (0 .. 2**64-1) of the first ``payload_bytes`` of each named page: one call for many pages.

    Args:
        pages_PB: (P, B) uint8 pool in host memory, contiguous.
        page_ids: Pages to read.
        payload_bytes: Bytes that count, at most B; padded with zeros to whole words.
        hashes: 16-byte block hash of each page, in the order of ``page_ids``.

    Raises:
        IndexError: A page that the pool does not have.
        ValueError: Not as many hashes as pages, a hash of another length, or a payload longer than a page.
    """
    if _native is None or not pages_PB.flags.c_contiguous:
        return page_checksums_numpy(pages_PB, page_ids, payload_bytes, hashes)
    weights = _upper_weights(payload_bytes)
    sums: list[int] = _native.page_sums(pages_PB, pages_PB.shape[1], page_ids, payload_bytes, hashes, weights)
    return sums


class HostChecksum:
    """The checksum as ``kvstore`` wants it: of one payload, of many, or of many while they are copied.

    Stateless and thread-safe; Python's lock is free while it works, if the native module is there.
    """

    def __call__(self, payload: memoryview, block_hash: bytes) -> int:
        """Checksum of a whole payload, contiguous."""
        if _native is None:
            words = np.frombuffer(payload, np.uint8)
            return page_checksums_numpy(words[None], [0], len(words), [block_hash])[0]
        nbytes = payload.nbytes
        (total,) = _native.copy_sums(None, (payload,), nbytes, (block_hash,), _upper_weights(nbytes))
        return int(total)

    def sums(self, pages: Sequence[Bytes], payload_bytes: int, hashes: Sequence[bytes]) -> list[int]:
        """Checksum of the first ``payload_bytes`` of each page.

        Args:
            pages: (B,) uint8 each, contiguous.
            payload_bytes: Bytes that count, at most B.
            hashes: 16 bytes for each page.

        Raises:
            ValueError: Not as many hashes as pages, or a payload longer than a page.
        """
        if _native is None:
            return [self(page.data[:payload_bytes], name) for page, name in zip(pages, hashes, strict=True)]
        sums: list[int] = _native.copy_sums(None, pages, payload_bytes, hashes, _upper_weights(payload_bytes))
        return sums

    def copy(
        self, targets: Sequence[Bytes], sources: Sequence[Bytes], payload_bytes: int, hashes: Sequence[bytes]
    ) -> list[int]:
        """Copy whole pages and return the checksum of what each target holds now, in one pass over the bytes.

        Args:
            targets: (B,) uint8 each, writable; none overlaps a source.
            sources: (B,) uint8 each. May change meanwhile: the sums are those of the bytes that were written.
            payload_bytes: Leading bytes of a page that count.
            hashes: 16 bytes for each page.

        Raises:
            ValueError: Lengths differ, or a payload longer than a page. Targets may have been written.
        """
        if _native is None:
            for target, source in zip(targets, sources, strict=True):
                np.copyto(target, source)
            return self.sums(targets, payload_bytes, hashes)
        weights = _upper_weights(payload_bytes)
        sums: list[int] = _native.copy_sums(targets, sources, payload_bytes, hashes, weights)
        return sums


host_checksum: Final = HostChecksum()
