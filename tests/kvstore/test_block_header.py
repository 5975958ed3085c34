import pytest
from epdserve.kvstore.block_header import HEADER, HEADER_BYTES, BlockHeader, verify_block
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.types import BlockHash
from hypothesis import given
from hypothesis import strategies as st

HASH = BlockHash(bytes(range(16)))
EXPECTED = BlockHeader(HASH, 0x1122334455667788, 113_920, exact=True)

headers = st.builds(
    BlockHeader,
    block_hash=st.binary(min_size=16, max_size=16).map(BlockHash),
    checksum=st.integers(0, 2**64 - 1),
    payload_bytes=st.integers(1, 2**32 - 1),
    exact=st.booleans(),
    crc32c=st.integers(0, 2**32 - 1),
)


def test_the_bytes_are_those_of_the_table() -> None:
    data = EXPECTED.encode()
    assert HEADER_BYTES == HEADER.size == len(data) == 64
    assert data[0:4] == b"EPKB"
    assert data[4:6] == b"\x01\x00"
    assert data[6:8] == b"\x01\x00"
    assert data[8:24] == HASH
    assert data[24:32] == bytes.fromhex("8877665544332211")
    assert data[32:36] == bytes(4)
    assert data[36:40] == (113_920).to_bytes(4, "little")
    assert data[40:] == bytes(24)


@given(headers)
def test_decode_gives_back_what_was_encoded(header: BlockHeader) -> None:
    assert BlockHeader.decode(header.encode()) == header
    header.verify(header.encode())


@given(headers, headers)
def test_verify_accepts_equal_headers_only(found: BlockHeader, wanted: BlockHeader) -> None:
    if found == wanted:
        wanted.verify(found.encode())
        return
    with pytest.raises(CorruptBlock):
        wanted.verify(found.encode())


@pytest.mark.parametrize("position", range(64))
def test_a_flipped_bit_in_any_byte_is_noticed(position: int) -> None:
    for bit in range(8):
        data = bytearray(EXPECTED.encode())
        data[position] ^= 1 << bit
        with pytest.raises(CorruptBlock) as caught:
            EXPECTED.verify(data)
        assert caught.value.field


@pytest.mark.parametrize("length", [0, 63, 65])
def test_another_length_is_a_callers_mistake(length: int) -> None:
    with pytest.raises(ValueError, match="64 bytes"):
        BlockHeader.decode(bytes(length))


def test_an_empty_page_is_no_header() -> None:
    with pytest.raises(CorruptBlock) as caught:
        EXPECTED.verify(bytes(64))
    assert caught.value.field == "magic"


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_hash": b"short"},
        {"checksum": -1},
        {"checksum": 2**64},
        {"payload_bytes": 0},
        {"payload_bytes": 2**32},
        {"crc32c": 2**32},
    ],
    ids=str,
)
def test_fields_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"block_hash": HASH, "checksum": 1, "payload_bytes": 1, "exact": False}
    with pytest.raises(ValueError, match=r"block_hash|checksum|payload_bytes"):
        BlockHeader(**{**fields, **wrong})  # type: ignore[arg-type]


def toy_checksum(payload: memoryview, block_hash: bytes) -> int:
    return sum(payload) + block_hash[0]


def test_verify_block_looks_at_the_header_and_then_at_the_payload() -> None:
    payload = bytes(range(100))
    header = BlockHeader(HASH, toy_checksum(memoryview(payload), HASH), len(payload), exact=True)
    page = bytearray(payload + header.encode() + bytes(36))
    verify_block(memoryview(page), header, toy_checksum)
    page[-1] = 1  # padding is nobody's
    verify_block(memoryview(page), header, toy_checksum)
    page[3] ^= 1
    with pytest.raises(CorruptBlock) as caught:
        verify_block(memoryview(page), header, toy_checksum)
    assert caught.value.field == "payload"
    page[100 + 8] ^= 1
    with pytest.raises(CorruptBlock) as caught:
        verify_block(memoryview(page), header, toy_checksum)
    assert caught.value.field == "block_hash"
