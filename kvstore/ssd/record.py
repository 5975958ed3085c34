"""A block on disk, version 1: the page as it is in memory, then its name. Little-endian, padded to 4096.

offset              size  field
0                   P     payload
P                   64    block header (``block_header.py``) with its crc32c filled: over payload and the
                          header's first 32 bytes
P + 64              128   name, the same 128 bytes that stand in the table of names when the block is stored

Name, version 1:

offset  size  field          why
0       4     magic "EPKN"   zero: no name, the slot is free
4       2     version
6       2     flags          bit 0 exact, 1 has a parent, 2 in the reserve, 3 deleted (scrubbing is under way)
8       16    block_hash
24      16    parent         leaves go first; zero without one
40      16    tenant         quotas and deletion
56      16    root           deletion of all blocks of a model: the first 16 bytes of the chain's root
72      8     sequence       rises with every put; of two names of one block the later wins
80      8     stored_at      seconds of the tier's time
88      8     last_use       the same; coarse on disk
96      8     checksum       the header's, so that a record must be *this* record
104     4     payload_crc32c  the header's, for the same reason
108     4     payload_bytes
112     12    reserved       zero
124     4     crc32c         over the fields above
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import google_crc32c
import numpy as np
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader, encode_header
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash
from numpy.typing import NDArray

NAME_BYTES: Final = 128
NAME_MAGIC: Final = b"EPKN"
NAME_VERSION: Final = 1
ALIGNMENT: Final = 4096  # what direct I/O wants of offsets, lengths and addresses
EXACT, HAS_PARENT, RESERVE, DELETED = 1, 2, 4, 8
_MAGIC_NUMBER: Final = int.from_bytes(NAME_MAGIC, "little")
_NAME_START: Final = NAME_MAGIC + NAME_VERSION.to_bytes(2, "little")
_FLAGS: Final = EXACT | HAS_PARENT | RESERVE | DELETED
_NAME: Final = struct.Struct("<4sHH16s16s16s16sQQQQII12s4x")
_NO_HASH: Final = bytes(BLOCK_HASH_BYTES)
_CRC_COVERS: Final = 32  # bytes of the header that its crc32c covers, after the payload
_CRC_AT: Final = 32
_RESERVED: Final = bytes(12)


NAME_DTYPE: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("block_hash", "V16"),
        ("parent", "V16"),
        ("tenant", "V16"),
        ("root", "V16"),
        ("sequence", "<u8"),
        ("stored_at", "<u8"),
        ("last_use", "<u8"),
        ("checksum", "<u8"),
        ("payload_crc32c", "<u4"),
        ("payload_bytes", "<u4"),
        ("reserved", "V12"),
        ("crc32c", "<u4"),
    ]
)


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Where things stand in a slot."""

    payload_bytes: int
    page_bytes: int = field(init=False)  # what of a slot is of use to a reader: payload and header
    slot_bytes: int = field(
        init=False
    )  # a record with its padding; for the real model as long as the block's page
    end_offset: int = field(init=False)  # where a scan begins to read a slot
    end_bytes: int = field(init=False)  # what a scan reads of a slot: header and name, whole sectors
    covered_bytes: int = field(
        init=False
    )  # what the header's crc32c covers: payload and the header's first half
    covers_of_end: int = field(init=False)  # of them, so many in the record's end
    name_at: int = field(init=False)  # in the record's end

    def __post_init__(self) -> None:
        if not 0 < self.payload_bytes < 2**32:
            raise ValueError(f"payload_bytes {self.payload_bytes} is out of range")
        page_bytes = self.payload_bytes + HEADER_BYTES
        slot_bytes = -(-(page_bytes + NAME_BYTES) // ALIGNMENT) * ALIGNMENT
        end_offset = self.payload_bytes // ALIGNMENT * ALIGNMENT
        for name, value in (
            ("page_bytes", page_bytes),
            ("slot_bytes", slot_bytes),
            ("end_offset", end_offset),
            ("end_bytes", slot_bytes - end_offset),
            ("covered_bytes", self.payload_bytes + _CRC_COVERS),
            ("covers_of_end", self.payload_bytes + _CRC_COVERS - end_offset),
            ("name_at", page_bytes - end_offset),
        ):
            object.__setattr__(self, name, value)


class Name(NamedTuple):
    """What the tier knows of a record without reading it."""

    block_hash: BlockHash
    parent: BlockHash | None
    tenant: bytes
    root: bytes
    sequence: int
    stored_at: int
    last_use: int
    checksum: int
    payload_crc32c: int
    payload_bytes: int
    exact: bool
    reserve: bool = False
    deleted: bool = False

    def encode(self) -> bytes:
        """The 128 bytes."""
        fields = self.fields()[:-4]
        return fields + int(google_crc32c.value(fields)).to_bytes(4, "little")

    def fields(self) -> bytes:
        """The 128 bytes, but that the name's own crc32c is zero."""
        flags = EXACT * self.exact | RESERVE * self.reserve | DELETED * self.deleted
        flags |= HAS_PARENT * (self.parent is not None)
        return _NAME.pack(
            NAME_MAGIC,
            NAME_VERSION,
            flags,
            self.block_hash,
            self.parent or _NO_HASH,
            self.tenant,
            self.root,
            self.sequence,
            self.stored_at,
            self.last_use,
            self.checksum,
            self.payload_crc32c,
            self.payload_bytes,
            _RESERVED,
        )

    @classmethod
    def decode(cls, data: bytes) -> Name | None:
        """The name in these 128 bytes, or None where there is none that can be trusted."""
        if len(data) != NAME_BYTES:
            raise ValueError(f"a name has {NAME_BYTES} bytes, got {len(data)}")
        fields = data[:-4]
        if google_crc32c.value(fields) != int.from_bytes(data[-4:], "little"):
            return None
        return cls.of_row(data)

    @classmethod
    def of_row(cls, data: bytes) -> Name | None:
        """``decode`` without the crc32c: for bytes that were proven before, or were made here."""
        (
            magic,
            version,
            flags,
            block_hash,
            parent,
            tenant,
            root,
            sequence,
            *times,
            total,
            crc,
            size,
            reserved,
        ) = _NAME.unpack_from(data)
        if magic != NAME_MAGIC or version != NAME_VERSION or flags & ~_FLAGS or any(reserved):
            return None
        return cls(
            BlockHash(block_hash),
            BlockHash(parent) if flags & HAS_PARENT else None,
            tenant,
            root,
            sequence=sequence,
            stored_at=times[0],
            last_use=times[1],
            checksum=total,
            payload_crc32c=crc,
            payload_bytes=size,
            exact=bool(flags & EXACT),
            reserve=bool(flags & RESERVE),
            deleted=bool(flags & DELETED),
        )

    def header(self) -> BlockHeader:
        """The header its record must have."""
        return BlockHeader(
            self.block_hash, self.checksum, self.payload_bytes, self.exact, self.payload_crc32c
        )


def is_name(data: Bytes) -> bool:
    """Whether these 128 bytes are a name, crc32c and all, without taking it apart."""
    fields = data[:-4].tobytes()
    if google_crc32c.value(fields) != int.from_bytes(data[-4:].tobytes(), "little"):
        return False
    known = fields[:6] == _NAME_START and not fields[6] & ~_FLAGS and not fields[7]
    return known and fields[112:] == bytes(12)


def name_rows(
    headers: NDArray[np.void],
    parents: Sequence[BlockHash | None],
    owners: Sequence[tuple[bytes, bytes]],
    reserve: Sequence[bool],
) -> NDArray[np.void]:
    """Names (``NAME_DTYPE``) of blocks with these headers; sequence, times and sums of crc32c are zero.

    ``owners`` are tenants and roots, 16 bytes each.
    """
    rows = np.zeros(len(headers), NAME_DTYPE)
    rows["magic"], rows["version"] = _MAGIC_NUMBER, NAME_VERSION
    flags = [
        HAS_PARENT * (parent is not None) | RESERVE * over
        for parent, over in zip(parents, reserve, strict=True)
    ]
    rows["flags"] = flags | (headers["flags"] & EXACT)
    rows["block_hash"], rows["checksum"] = headers["block_hash"], headers["checksum"]
    rows["payload_bytes"] = headers["payload_bytes"]
    rows["parent"] = np.frombuffer(b"".join([parent or _NO_HASH for parent in parents]), "V16")
    rows["tenant"] = np.frombuffer(b"".join([tenant for tenant, _ in owners]), "V16")
    rows["root"] = np.frombuffer(b"".join([root for _, root in owners]), "V16")
    return rows


def verify_record(record: Bytes, layout: RecordLayout, name: Name, total: int, crc: int) -> None:
    """Prove that a record is the one its name promises: all of the header, checksum, crc32c.

    Args:
        record: (slot_bytes,) uint8. layout: Sizes. name: What was promised.
        total: Checksum found over the payload under the name's hash.
        crc: crc32c found over the first ``layout.covered_bytes``.

    Raises:
        CorruptBlock: It is not.
    """
    end, after = layout.payload_bytes, layout.page_bytes
    wanted = encode_header(name.block_hash, name.checksum, end, exact=name.exact, crc32c=name.payload_crc32c)
    view = record.data[end:after]
    if view != wanted:
        name.header().verify(view)  # says which field differs
    if total != name.checksum:
        raise CorruptBlock(name.block_hash, field="payload", found=total, wanted=name.checksum)
    if crc != name.payload_crc32c:
        raise CorruptBlock(name.block_hash, field="crc32c", found=crc, wanted=name.payload_crc32c)


def restore_page(record: Bytes, layout: RecordLayout) -> None:
    """Make a verified record a page as it is in memory: no crc32c, no name, zeros behind the header."""
    at = layout.payload_bytes + _CRC_AT
    record[at : at + 4] = 0
    record[layout.page_bytes :] = 0


def name_in_record(end: Bytes, layout: RecordLayout) -> Name | None:
    """The name of the record whose last ``end_bytes`` these are, or None where header and name disagree."""
    at = layout.payload_bytes - layout.end_offset
    name = Name.decode(end[at + HEADER_BYTES : at + HEADER_BYTES + NAME_BYTES].tobytes())
    if name is None or name.payload_bytes != layout.payload_bytes:
        return None
    try:
        name.header().verify(end[at : at + HEADER_BYTES].tobytes())
    except CorruptBlock:
        return None
    return name
