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
from dataclasses import dataclass
from typing import Final

import google_crc32c
import numpy as np
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader, Checksum, encode_header
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash

NAME_BYTES: Final = 128
NAME_MAGIC: Final = b"EPKN"
NAME_VERSION: Final = 1
ALIGNMENT: Final = 4096  # what direct I/O wants of offsets, lengths and addresses
EXACT, HAS_PARENT, RESERVE, DELETED = 1, 2, 4, 8
_NAME_START: Final = NAME_MAGIC + NAME_VERSION.to_bytes(2, "little")
_FLAGS: Final = EXACT | HAS_PARENT | RESERVE | DELETED
_NAME: Final = struct.Struct("<4sHH16s16s16s16sQQQQII12s")
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

    def __post_init__(self) -> None:
        if not 0 < self.payload_bytes < 2**32:
            raise ValueError(f"payload_bytes {self.payload_bytes} is out of range")

    @property
    def page_bytes(self) -> int:
        """What of a slot is of use to a reader: payload and header."""
        return self.payload_bytes + HEADER_BYTES

    @property
    def slot_bytes(self) -> int:
        """A record with its padding. 114,688 for the real model, as much as the block's page."""
        return -(-(self.page_bytes + NAME_BYTES) // ALIGNMENT) * ALIGNMENT

    @property
    def end_offset(self) -> int:
        """Where a scan begins to read a slot."""
        return self.payload_bytes // ALIGNMENT * ALIGNMENT

    @property
    def end_bytes(self) -> int:
        """What a scan reads of a slot: header and name, whole sectors."""
        return self.slot_bytes - self.end_offset


@dataclass(frozen=True, slots=True)
class Name:
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

    def encode(self, *, payload_crc32c: int | None = None) -> bytes:
        """The 128 bytes, with another ``payload_crc32c`` if one is given."""
        flags = EXACT * self.exact | RESERVE * self.reserve | DELETED * self.deleted
        flags |= HAS_PARENT * (self.parent is not None)
        fields = _NAME.pack(
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
            self.payload_crc32c if payload_crc32c is None else payload_crc32c,
            self.payload_bytes,
            _RESERVED,
        )
        return fields + int(google_crc32c.value(fields)).to_bytes(4, "little")

    @classmethod
    def decode(cls, data: bytes) -> Name | None:
        """The name in these 128 bytes, or None where there is none that can be trusted."""
        if len(data) != NAME_BYTES:
            raise ValueError(f"a name has {NAME_BYTES} bytes, got {len(data)}")
        fields = data[:-4]
        if google_crc32c.value(fields) != int.from_bytes(data[-4:], "little"):
            return None
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
        ) = _NAME.unpack(fields)
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


def payload_crc32c(record: Bytes, layout: RecordLayout, page: Bytes | None = None) -> int:
    """What the header's crc32c must be. Without a copy; all but the record's end may be in ``page`` instead."""
    split = layout.end_offset
    crc = google_crc32c.value((record if page is None else page)[:split])
    return int(google_crc32c.extend(crc, record[split : layout.payload_bytes + _CRC_COVERS].tobytes()))


def finish_record(record: Bytes, layout: RecordLayout, name: Name, page: Bytes | None = None) -> bytes:
    """Turn a page that was copied into a slot's buffer into a record: header, name, zeros behind.

    Args:
        record: (slot_bytes,) uint8; what stands behind the payload is overwritten.
        layout: Sizes.
        name: All of it but ``payload_crc32c``, which is computed here.
        page: Where all but the record's end is, if it was not copied.

    Returns:
        The name's 128 bytes as they stand in the record.
    """
    end, after = layout.payload_bytes, layout.page_bytes
    view = record.data
    header = encode_header(name.block_hash, name.checksum, end, exact=name.exact)
    view[end : end + _CRC_COVERS] = header[:_CRC_COVERS]
    crc = payload_crc32c(record, layout, page)
    view[end + _CRC_COVERS : after] = crc.to_bytes(4, "little") + header[_CRC_COVERS + 4 :]
    encoded = name.encode(payload_crc32c=crc)
    view[after : after + NAME_BYTES] = encoded
    record[after + NAME_BYTES :] = 0
    return encoded


def verify_record(record: Bytes, layout: RecordLayout, name: Name, checksum: Checksum) -> None:
    """Prove that a record is the one its name promises: all of the header, crc32c, checksum.

    Raises:
        CorruptBlock: It is not.
    """
    end, after = layout.payload_bytes, layout.page_bytes
    crc = name.payload_crc32c
    wanted = encode_header(name.block_hash, name.checksum, end, exact=name.exact, crc32c=crc)
    view = record.data
    if view[end:after] != wanted:
        name.header().verify(view[end:after])  # says which field differs
    total = checksum(view[:end], name.block_hash)
    if total != name.checksum:
        raise CorruptBlock(name.block_hash, field="payload", found=total, wanted=name.checksum)
    found = payload_crc32c(record, layout)
    if found != crc:
        raise CorruptBlock(name.block_hash, field="crc32c", found=found, wanted=crc)


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
