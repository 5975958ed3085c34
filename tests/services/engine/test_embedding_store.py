import pytest
import torch
from epdserve.services.engine.embedding_store import EmbeddingStore, slot_checksum
from epdserve.services.engine.image_metrics import EmbeddingMetrics
from epdserve.services.image_types import SPAN_ROWS
from support.manual_clock import ManualClock

HIDDEN = 32
SLOT_BYTES = SPAN_ROWS * HIDDEN * 2
KEEP_S = 10.0


def name(n: int) -> bytes:
    return bytes([n]) * 32


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> EmbeddingStore:
    """Four slots."""
    return EmbeddingStore(
        hidden=HIDDEN,
        nbytes=4 * SLOT_BYTES,
        max_tokens=2 * SPAN_ROWS,
        keep_s=KEEP_S,
        clock=clock,
        metrics=EmbeddingMetrics.unregistered(),
    )


@pytest.mark.parametrize("tokens", [1, SPAN_ROWS - 1, SPAN_ROWS, SPAN_ROWS + 1, 4 * SPAN_ROWS])
def test_what_is_put_is_read_to_the_bit(store: EmbeddingStore, tokens: int) -> None:
    assert store.put(name(1), rows(tokens).float())
    held = store.pin(name(1), tokens)
    assert held is not None
    assert torch.equal(store.read(held), rows(tokens))
    assert len(held.slots) == -(-tokens // SPAN_ROWS)
    for index, slot in enumerate(held.slots):
        used = store.used_bytes(index, tokens)
        assert slot_checksum(store.pool.bytes_of(slot), used, name(1)) == held.checksums[index]
    store.unpin(held)
    store.check()


def test_a_small_image_takes_one_slot(store: EmbeddingStore) -> None:
    store.put(name(1), rows(3))
    assert store.held_bytes() == SLOT_BYTES


def test_an_image_of_another_length_is_not_lent(store: EmbeddingStore) -> None:
    store.put(name(1), rows(5))
    assert store.pin(name(1), 6) is None
    assert store.pin(name(2), 5) is None


def test_the_image_used_longest_ago_goes_first(store: EmbeddingStore, clock: ManualClock) -> None:
    for n in range(1, 5):
        store.put(name(n), rows(SPAN_ROWS, n))
    clock.advance(KEEP_S)
    assert store.touch(name(1))
    clock.advance(KEEP_S)
    assert store.put(name(5), rows(SPAN_ROWS + 1))
    assert [store.touch(name(n)) for n in range(1, 6)] == [True, False, False, True, True]
    store.check()


def test_what_was_asked_for_stays_until_it_was_fetched_or_its_time_is_over(
    store: EmbeddingStore, clock: ManualClock
) -> None:
    for n in range(1, 5):
        store.put(name(n), rows(SPAN_ROWS, n))
    assert not store.put(name(5), rows(SPAN_ROWS))
    held = store.pin(name(2), SPAN_ROWS)
    assert held is not None
    store.unpin(held)
    assert store.put(name(5), rows(SPAN_ROWS))
    assert not store.touch(name(2))
    clock.advance(KEEP_S)
    assert store.put(name(6), rows(4 * SPAN_ROWS))
    assert store.held_bytes() == 4 * SLOT_BYTES


def test_what_is_lent_stays_however_long(store: EmbeddingStore, clock: ManualClock) -> None:
    store.put(name(1), rows(SPAN_ROWS, 1))
    held = store.pin(name(1), SPAN_ROWS)
    assert held is not None
    clock.advance(100 * KEEP_S)
    assert not store.put(name(2), rows(4 * SPAN_ROWS))
    assert store.put(name(3), rows(3 * SPAN_ROWS))
    assert torch.equal(store.read(held), rows(SPAN_ROWS, 1))
    assert store.pinned() == 1
    store.unpin(held)
    clock.advance(KEEP_S)
    assert store.put(name(2), rows(4 * SPAN_ROWS))
    store.check()


def test_an_image_that_is_put_twice_is_held_once(store: EmbeddingStore) -> None:
    assert store.put(name(1), rows(5))
    assert store.put(name(1), rows(5))
    assert store.held_bytes() == SLOT_BYTES
    store.check()


def test_an_arena_that_holds_no_image_is_refused() -> None:
    with pytest.raises(ValueError, match="hold no image"):
        EmbeddingStore(
            hidden=HIDDEN,
            nbytes=SLOT_BYTES,
            max_tokens=SPAN_ROWS + 1,
            keep_s=1.0,
            clock=ManualClock(),
            metrics=EmbeddingMetrics.unregistered(),
        )
