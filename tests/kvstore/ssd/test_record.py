"""Bytes on disk are what the tables in the docstrings and the README say."""

from __future__ import annotations

import dataclasses

import google_crc32c
import numpy as np
import pytest
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.ssd.catalog import HEAD_BYTES
from epdserve.kvstore.ssd.record import (
    NAME_BYTES,
    NAME_DTYPE,
    Name,
    RecordLayout,
    finish_record,
    name_in_record,
    payload_crc32c,
    restore_page,
    verify_record,
)
from epdserve.kvstore.types import BlockHash
from support.kv_blocks import toy_checksum
from support.ssd import PAYLOAD, page_of
from support.ssd import name as block_name

NAME = Name(
    BlockHash(b"h" * 16),
    BlockHash(b"p" * 16),
    b"t" * 16,
    b"r" * 16,
    sequence=1,
    stored_at=2,
    last_use=3,
    checksum=4,
    payload_crc32c=5,
    payload_bytes=6,
    exact=True,
    reserve=True,
)


def test_a_name_is_spelled_as_documented() -> None:
    fields = (
        b"EPKN" + b"\x01\x00" + b"\x07\x00" + b"h" * 16 + b"p" * 16 + b"t" * 16 + b"r" * 16
        + b"".join(number.to_bytes(8, "little") for number in (1, 2, 3, 4))
        + (5).to_bytes(4, "little") + (6).to_bytes(4, "little") + bytes(12)
    )  # fmt: skip
    assert NAME.encode() == fields + google_crc32c.value(fields).to_bytes(4, "little")
    assert NAME_DTYPE.itemsize == NAME_BYTES == len(NAME.encode())
    row = np.frombuffer(NAME.encode(), NAME_DTYPE)[0]
    assert (int(row["last_use"]), int(row["sequence"]), row["tenant"].tobytes()) == (3, 1, b"t" * 16)
    assert HEAD_BYTES % NAME_BYTES == 0


@pytest.mark.parametrize(
    "change", [{}, {"parent": None}, {"deleted": True, "exact": False}, {"reserve": False}]
)
def test_a_name_reads_back(change: dict[str, object]) -> None:
    name = dataclasses.replace(NAME, **change)  # type: ignore[arg-type]
    assert Name.decode(name.encode()) == name


def test_no_flipped_bit_of_a_name_goes_unseen() -> None:
    good = NAME.encode()
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        assert Name.decode(bytes(bad)) is None
    assert Name.decode(bytes(NAME_BYTES)) is None


def test_sizes_of_the_real_models_record() -> None:
    layout = RecordLayout(113_920)
    assert (layout.slot_bytes, layout.page_bytes) == (114_688, 113_984)
    assert (layout.end_offset, layout.end_bytes) == (110_592, 4096)
    assert RecordLayout(4096 * 3 - 64).slot_bytes == 4096 * 4  # no room for the name in the page's padding


def test_a_record_holds_page_crc_and_name_and_becomes_a_page_again() -> None:
    layout, block = RecordLayout(PAYLOAD), block_name("block")
    page = page_of(block)
    record = page.copy()
    name = dataclasses.replace(
        NAME,
        block_hash=block,
        payload_bytes=PAYLOAD,
        checksum=toy_checksum(page[:PAYLOAD].data, block),
        payload_crc32c=payload_crc32c(page, layout),
    )
    finish_record(record, layout, name)
    covered = record[: PAYLOAD + 32].tobytes()
    assert int.from_bytes(record[PAYLOAD + 32 : PAYLOAD + 36].tobytes(), "little") == google_crc32c.value(
        covered
    )
    verify_record(record, layout, name, toy_checksum)
    assert name_in_record(record[layout.end_offset :], layout) == name
    restored = record.copy()
    restore_page(restored, layout)
    assert np.array_equal(restored, page)
    record[17] ^= 4
    with pytest.raises(CorruptBlock):
        verify_record(record, layout, name, toy_checksum)
    with pytest.raises(CorruptBlock, match="crc32c"):
        verify_record(record, layout, name, lambda *_: name.checksum)
