"""Sums of many pages at once, and of pages while they are copied, by whatever checksum the caller brought.

A checksum is a callable for one payload. One that can do more says so by its methods: it then sums a batch in one
call, or copies and sums in one pass over the bytes, without Python's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader, Checksum
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.native import copy_pages
from epdserve.kvstore.staging import Bytes


@runtime_checkable
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
    if isinstance(checksum, BatchChecksum) and _alike(headers):
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
    if isinstance(checksum, BatchChecksum) and _alike(headers):
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


def _alike(headers: Sequence[BlockHeader]) -> bool:
    """Whether there is a header at all, and all payloads have its length: what one batch needs."""
    return bool(headers) and all(header.payload_bytes == headers[0].payload_bytes for header in headers)
