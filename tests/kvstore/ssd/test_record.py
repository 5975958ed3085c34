"""Bytes on disk are what the tables in the docstrings and the README say."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest
from epdserve.kvstore.block_header import BlockHeader
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.native import crc32c_of, seal_records
from epdserve.kvstore.ssd.catalog import HEAD_BYTES
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.record import (
    NAME_BYTES,
    NAME_DTYPE,
    Name,
    RecordLayout,
    name_in_record,
    restore_page,
    verify_record,
)
from epdserve.kvstore.ssd.slots import aligned
from epdserve.kvstore.types import BlockHash
from support.kv_blocks import toy_checksum
from support.ssd import PAYLOAD
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
    name = NAME._replace(**change)
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


def _page(block: BlockHash, payload: int) -> Bytes:
    content = np.random.default_rng([*block]).integers(0, 256, payload, np.uint8)
    header = BlockHeader(block, toy_checksum(content.data, block), payload, exact=True)
    return np.concatenate([content, np.frombuffer(header.encode(), np.uint8)])


@pytest.mark.parametrize("payload", [PAYLOAD, 4096 * 2 + 100])
def test_a_record_holds_page_crc_and_name_and_becomes_a_page_again(payload: int) -> None:
    layout, block = RecordLayout(payload), block_name("block")
    page = aligned(1, layout.slot_bytes)[0]
    page[: layout.page_bytes] = _page(block, payload)
    record, total = page.copy(), toy_checksum(page[:payload].data, block)
    name = NAME._replace(block_hash=block, payload_bytes=payload, checksum=total, payload_crc32c=0)
    end = record[layout.end_offset :]
    at = payload - layout.end_offset
    end.data[at:] = (
        page.data[payload : layout.page_bytes].tobytes() + name.fields() + bytes(len(end) - at - 192)
    )
    seal_records([record], layout.end_offset, [end], layout.covers_of_end)
    crc = google_crc32c.value(record[: payload + 32].tobytes())
    assert int.from_bytes(record[payload + 32 : payload + 36].tobytes(), "little") == crc
    assert crc32c_of([record], layout.covered_bytes) == [crc]
    name = name._replace(payload_crc32c=crc)
    verify_record(record, layout, name, total, crc)
    assert name_in_record(record[layout.end_offset :], layout) == name
    restored = record.copy()
    restore_page(restored, layout)
    assert np.array_equal(restored, page)
    for changed in ((total ^ 1, crc, "payload"), (total, crc ^ 1, "crc32c")):
        with pytest.raises(CorruptBlock, match=changed[2]):
            verify_record(record, layout, name, changed[0], changed[1])
    record[payload + 40] ^= 1
    with pytest.raises(CorruptBlock):
        verify_record(record, layout, name, total, crc)
