import pytest
from epdserve.kvstore.block_events import EventBuffer
from epdserve.kvstore.types import BlockEvents, BlockHash

A, B, C = (BlockHash(bytes([letter]) * 16) for letter in b"abc")


def test_batches_are_numbered_without_gaps() -> None:
    buffer = EventBuffer(10)
    buffer.note(A, held=True)
    buffer.note(B, held=True)
    assert buffer.drain() == BlockEvents(0, added=(A, B))
    buffer.note(A, held=False)
    assert buffer.drain() == BlockEvents(2, removed=(A,))
    assert buffer.drain() == BlockEvents(3)
    assert buffer.next_seq == 3


def test_only_the_last_change_of_a_hash_is_told() -> None:
    buffer = EventBuffer(10)
    buffer.note(A, held=True)
    buffer.note(A, held=False)  # told all the same: a snapshot may lie between the two
    buffer.note(B, held=False)
    buffer.note(B, held=True)
    assert buffer.drain() == BlockEvents(0, added=(B,), removed=(A,))


def test_a_full_buffer_drops_everything_and_leaves_a_gap() -> None:
    buffer = EventBuffer(2)
    for block_hash in (A, B, C):
        buffer.note(block_hash, held=True)
    assert buffer.drain() == BlockEvents(1, added=(C,))
    assert buffer.overflows == 1


def test_a_hash_that_is_known_needs_no_room() -> None:
    buffer = EventBuffer(2)
    for block_hash in (A, B, A, B):
        buffer.note(block_hash, held=True)
    assert buffer.overflows == 0


def test_a_buffer_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        EventBuffer(0)
