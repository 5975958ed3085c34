"""Sums of many pages at once, and of pages while they are copied, by whatever checksum the caller brought.

A checksum is a callable for one payload. One that can do more says so by its methods: it then sums a batch in one
call, or copies and sums in one pass over the bytes, without Python's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, Protocol, TypeGuard

import numpy as np
from epdserve.kvstore.block_header import HEADER_BYTES, HEADER_DTYPE, BlockHeader, Checksum, are_headers
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.native import copy_pages, gather
from epdserve.kvstore.staging import Bytes

_FEW: Final = 8


class BatchChecksum(Protocol):
    """A checksum that takes many pages in one call. Thread-safe."""

    def __call__(self, payload: memoryview, block_hash: bytes, /) -> int:
        """Sum of one payload."""

    def sums(self, pages: Sequence[Bytes], payload_bytes: int, hashes: Sequence[bytes]) -> list[int]:
        """Sum of the first ``payload_bytes`` of each page."""

    def copy(
        self, targets: Sequence[Bytes], sources: Sequence[Bytes], payload_bytes: int, hashes: Sequence[bytes]
    ) -> list[int]:
        """Copy whole pages; the sums are those of what the targets hold now."""


def sum_blocks(checksum: Checksum, pages: Sequence[Bytes], headers: Sequence[BlockHeader]) -> list[int]:
    """Sum of each page's payload; pages are (bytes,) uint8, as long as ``headers`` says at least."""
    if _takes_many(checksum) and _alike(headers):
        return checksum.sums(pages, headers[0].payload_bytes, [header.block_hash for header in headers])
    blocks = zip(pages, headers, strict=True)
    return [checksum(page.data[: header.payload_bytes], header.block_hash) for page, header in blocks]


def copy_blocks(
    targets: Sequence[Bytes],
    sources: Sequence[Bytes],
    headers: Sequence[BlockHeader],
    checksum: Checksum | None,
) -> list[int] | None:
    """Copy pages of one length; returns the sum of what each target holds now, None without a checksum.

    A source may change meanwhile: the sums are those of what was written.
    """
    if checksum is not None and _takes_many(checksum) and _alike(headers):
        hashes = [header.block_hash for header in headers]
        return checksum.copy(targets, sources, headers[0].payload_bytes, hashes)
    copy_pages(targets, sources)
    return None if checksum is None else sum_blocks(checksum, targets, headers)


def require_header(page: Bytes, header: BlockHeader) -> None:
    """Compare the 64 bytes behind a page's payload with the header it has to have.

    Raises:
        CorruptBlock: They differ; ``field`` is the first that does.
    """
    end = header.payload_bytes
    found = page[end : end + HEADER_BYTES].tobytes()
    if found != header.encode():
        header.verify(found)


def require_sum(total: int, header: BlockHeader) -> None:
    """Compare the sum found over a payload with the one promised.

    Raises:
        CorruptBlock: They differ.
    """
    if total != header.checksum:
        raise CorruptBlock(header.block_hash, field="payload", found=total, wanted=header.checksum)


def sound_until(
    pages: Sequence[Bytes], headers: Sequence[BlockHeader], sums: Sequence[int] | None
) -> tuple[int, CorruptBlock | None]:
    """How many pages, from the first on, hold what they have to, and what is wrong with the next one.

    Args:
        pages: (bytes,) uint8 each. headers: As many. sums: Found over the payloads; None if that does not matter.
    """
    if _all_sound(pages, headers, sums):
        return len(headers), None
    for number, (page, header) in enumerate(zip(pages, headers, strict=True)):
        try:
            require_header(page, header)
            if sums is not None:
                require_sum(sums[number], header)
        except CorruptBlock as error:
            return number, error
    return len(headers), None


def _all_sound(pages: Sequence[Bytes], headers: Sequence[BlockHeader], sums: Sequence[int] | None) -> bool:
    """Whether a look at all of them at once finds nothing wrong; a few are quicker one by one."""
    if len(headers) < _FEW or not _alike(headers):
        return False
    payload_bytes, promised = headers[0].payload_bytes, [header.checksum for header in headers]
    rows = np.frombuffer(gather(pages, payload_bytes, HEADER_BYTES), HEADER_DTYPE)
    return (
        (sums is None or sums == promised)
        and bool(are_headers(rows, payload_bytes).all())
        and rows["block_hash"].tobytes() == b"".join([header.block_hash for header in headers])
        and rows["checksum"].tolist() == promised
        and rows["flags"].tolist() == [header.exact for header in headers]
        and rows["crc32c"].tolist() == [header.crc32c for header in headers]
    )


def _takes_many(checksum: Checksum) -> TypeGuard[BatchChecksum]:
    kind: type = type(checksum)
    return _has_batches(kind)


@functools.cache  # to ask a protocol takes longer than a copy
def _has_batches(kind: type) -> bool:
    return callable(getattr(kind, "sums", None)) and callable(getattr(kind, "copy", None))


def _alike(headers: Sequence[BlockHeader]) -> bool:
    """Whether there is a header at all, and all payloads have its length: what one batch needs."""
    return bool(headers) and all(header.payload_bytes == headers[0].payload_bytes for header in headers)
