"""Block header, version 1: the 64 bytes after a block's payload. Little-endian. Payload at offset 0.

offset  size  field          why
0       4     magic "EPKB"   finds records when a catalog is rebuilt by scanning
4       2     version
6       2     flags          bit 0: exact (no encoder replay upstream)
8       16    block_hash     echoed on every read: a checksum proves bytes, not identity
24      8     checksum       odd-weighted 64-bit sum over payload, seeded with length and hash
32      4     crc32c         durable records only, zero in memory
36      4     payload_bytes
40      24    reserved       zero

A page's generation is not among them: the same bytes live in many places, and each place counts its own
owners.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash
from numpy.typing import NDArray

MAGIC: Final = b"EPKB"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHH16sQII24s")
HEADER_BYTES: Final = HEADER.size
HEADER_DTYPE: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("block_hash", "V16"),
        ("checksum", "<u8"),
        ("crc32c", "<u4"),
        ("payload_bytes", "<u4"),
        ("reserved", "<u8", (3,)),
    ]
)
_MAGIC_NUMBER: Final = int.from_bytes(MAGIC, "little")
_EXACT: Final = 1
_RESERVED: Final = bytes(24)

Checksum = Callable[
    [memoryview, bytes], int
]  # (payload, block hash) -> 64-bit sum; computed where the bytes are


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block says of itself."""

    block_hash: BlockHash
    checksum: int
    payload_bytes: int
    exact: bool
    crc32c: int = 0

    def __post_init__(self) -> None:
        if len(self.block_hash) != BLOCK_HASH_BYTES:
            raise ValueError(f"block_hash must have {BLOCK_HASH_BYTES} bytes, got {len(self.block_hash)}")
        if not 0 <= self.checksum < 2**64 or not 0 <= self.crc32c < 2**32:
            raise ValueError(f"checksum {self.checksum} or crc32c {self.crc32c} is out of range")
        if not 0 < self.payload_bytes < 2**32:
            raise ValueError(f"payload_bytes {self.payload_bytes} is out of range")

    def encode(self) -> bytes:
        """The 64 bytes."""
        return encode_header(
            self.block_hash, self.checksum, self.payload_bytes, exact=self.exact, crc32c=self.crc32c
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> BlockHeader:
        """Read a header of which nothing is known yet.

        Raises:
            CorruptBlock: Not a header of this version.
            ValueError: ``data`` has another length than 64.
        """
        if len(data) != HEADER_BYTES:
            raise ValueError(f"a block header has {HEADER_BYTES} bytes, got {len(data)}")
        magic, version, flags, block_hash, checksum, crc32c, payload_bytes, reserved = HEADER.unpack(data)
        if magic != MAGIC:
            raise CorruptBlock(block_hash, field="magic", found=magic, wanted=MAGIC)
        if version != VERSION:
            raise CorruptBlock(block_hash, field="version", found=version, wanted=VERSION)
        if flags & ~_EXACT:
            raise CorruptBlock(block_hash, field="flags", found=flags & ~_EXACT, wanted=0)
        if reserved != _RESERVED:
            raise CorruptBlock(block_hash, field="reserved", found=reserved, wanted=_RESERVED)
        if payload_bytes == 0:
            raise CorruptBlock(block_hash, field="payload_bytes", found=0, wanted="a positive number")
        return cls(BlockHash(block_hash), checksum, payload_bytes, bool(flags & _EXACT), crc32c)

    def verify(self, data: bytes | bytearray | memoryview) -> None:
        """Compare all 64 bytes found in a page with this header, the one a handle promised.

        Raises:
            CorruptBlock: They differ; ``field`` is the first that does.
            ValueError: ``data`` has another length than 64.
        """
        found = BlockHeader.decode(data)
        for field in ("block_hash", "checksum", "payload_bytes", "exact", "crc32c"):
            if getattr(found, field) != getattr(self, field):
                raise CorruptBlock(
                    self.block_hash, field=field, found=getattr(found, field), wanted=getattr(self, field)
                )


def are_headers(rows: NDArray[np.void], payload_bytes: int) -> NDArray[np.bool_]:
    """Which of these headers (``HEADER_DTYPE``) ``decode`` would take, and are of payloads of this length."""
    sound: NDArray[np.bool_] = (
        (rows["magic"] == _MAGIC_NUMBER)
        & (rows["version"] == VERSION)
        & (rows["flags"] <= _EXACT)
        & (rows["payload_bytes"] == payload_bytes)
        & ~rows["reserved"].any(axis=1)
    )
    return sound


def encode_header(
    block_hash: BlockHash, checksum: int, payload_bytes: int, *, exact: bool, crc32c: int = 0
) -> bytes:
    """The 64 bytes of a header whose fields are known to be sound: for hundreds in a row."""
    flags = _EXACT if exact else 0
    return HEADER.pack(MAGIC, VERSION, flags, block_hash, checksum, crc32c, payload_bytes, _RESERVED)


def verify_block(page: memoryview, expected: BlockHeader, checksum: Checksum) -> None:
    """Prove that a page holds exactly the block that was asked for: header first, then payload.

    Args:
        page: Payload, header, padding.
        expected: From the handle that named the block.
        checksum: Computes the sum; this package never reads a payload itself.

    Raises:
        CorruptBlock: It does not.
    """
    expected.verify(page[expected.payload_bytes : expected.payload_bytes + HEADER_BYTES])
    found = checksum(page[: expected.payload_bytes], expected.block_hash)
    if found != expected.checksum:
        raise CorruptBlock(expected.block_hash, field="payload", found=found, wanted=expected.checksum)
