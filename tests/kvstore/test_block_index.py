import random

from epdserve.kvstore.block_index import BlockIndex
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.types import BlockEvents, BlockHash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manual_clock import ManualClock

CHAIN = [BlockHash(bytes([number]) * 16) for number in range(12)]
STRANGER = BlockHash(b"?" * 16)


def test_nobody_holds_anything_at_first() -> None:
    index = BlockIndex()
    assert index.longest_prefix(CHAIN) == {}
    assert index.longest_prefix([]) == {}


def test_each_worker_is_told_with_the_length_of_its_own_prefix() -> None:
    index = BlockIndex()
    index.load_snapshot("all", 0, CHAIN)
    index.load_snapshot("some", 0, CHAIN[:4])
    index.load_snapshot("holes", 0, CHAIN[:2] + CHAIN[3:])
    index.load_snapshot("none", 0, [STRANGER])
    index.load_snapshot("tail only", 0, CHAIN[1:])
    assert index.longest_prefix(CHAIN) == {"all": 12, "some": 4, "holes": 2}
    assert index.longest_prefix(CHAIN[:3]) == {"all": 3, "some": 3, "holes": 2}


def test_events_change_what_a_worker_holds() -> None:
    index = BlockIndex()
    index.load_snapshot("w", 7, CHAIN[:2])
    assert index.apply("w", BlockEvents(7, added=(CHAIN[2], CHAIN[3])))
    assert index.longest_prefix(CHAIN) == {"w": 4}
    assert index.apply("w", BlockEvents(9, removed=(CHAIN[1], STRANGER)))
    assert index.longest_prefix(CHAIN) == {"w": 1}
    assert index.apply("w", BlockEvents(11))


def test_a_gap_asks_for_a_snapshot_and_changes_nothing() -> None:
    index = BlockIndex()
    index.load_snapshot("w", 0, CHAIN[:1])
    assert not index.apply("w", BlockEvents(1, added=(CHAIN[1],)))
    assert not index.apply("stranger", BlockEvents(0, added=(CHAIN[1],)))
    assert index.longest_prefix(CHAIN) == {"w": 1}
    assert index.counts().gaps == 2
    index.load_snapshot("w", 2, CHAIN[:2])
    assert index.apply("w", BlockEvents(2, added=(CHAIN[2],)))
    assert index.longest_prefix(CHAIN) == {"w": 3}


def test_batches_from_before_the_snapshot_are_skipped() -> None:
    index = BlockIndex()
    index.load_snapshot("w", 5, CHAIN[:3])
    assert index.apply("w", BlockEvents(3, removed=(CHAIN[0], CHAIN[1])))
    assert index.longest_prefix(CHAIN) == {"w": 3}


def test_a_snapshot_of_a_restarted_worker_replaces_everything() -> None:
    index = BlockIndex()
    index.load_snapshot("w", 900, CHAIN)
    index.load_snapshot("w", 0, [])
    assert index.longest_prefix(CHAIN) == {}
    assert index.apply("w", BlockEvents(0, added=(CHAIN[0],)))
    assert index.longest_prefix(CHAIN) == {"w": 1}


def test_forgotten_workers_leave_nothing_behind_and_their_bits_are_used_again() -> None:
    index = BlockIndex()
    for round_number in range(50):
        for name in ("a", "b", "c"):
            index.load_snapshot(f"{name}{round_number}", 0, CHAIN[:5])
        assert index.longest_prefix(CHAIN) == {f"{name}{round_number}": 5 for name in "abc"}
        for name in ("b", "a", "c"):
            index.forget(f"{name}{round_number}")
    index.forget("never seen")
    assert index.counts().workers == index.counts().hashes == 0
    index.load_snapshot("last", 0, CHAIN[:1])
    assert max(index._table.holders(CHAIN)) < 8  # three bits were enough for all of them


@given(st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=5), st.integers(0, 12))
def test_longest_prefix_is_what_counting_by_hand_gives(held: list[set[int]], length: int) -> None:
    index = BlockIndex()
    expected = {}
    for number, positions in enumerate(held):
        index.load_snapshot(str(number), 0, [CHAIN[position] for position in positions])
        blocks = next((i for i in range(length) if i not in positions), length)
        if blocks:
            expected[str(number)] = blocks
    assert index.longest_prefix(CHAIN[:length]) == expected


@settings(deadline=None)  # a busy machine may stand still for a while
@given(st.integers(0, 2**32))
def test_a_reader_that_joins_at_any_time_ends_with_what_the_worker_holds(seed: int) -> None:
    """The worker's side and the reader's side together, gaps and snapshots at random."""
    dice = random.Random(seed)
    blocks = BlockManager(6, ManualClock(), event_capacity=5)
    index = BlockIndex()
    joined = False
    for _ in range(30):
        _change(blocks, dice)
        if dice.random() < 0.3:
            joined = _join(index, blocks)
        if dice.random() < 0.5 and joined and not index.apply("w", blocks.drain_events()):
            joined = _join(index, blocks)
    _join(index, blocks)
    assert index.apply("w", blocks.drain_events())
    _, held = blocks.snapshot()
    assert {h for h in CHAIN if index.longest_prefix([h])} == set(held)


def _join(index: BlockIndex, blocks: BlockManager) -> bool:
    index.load_snapshot("w", *blocks.snapshot())
    return True


def _change(blocks: BlockManager, dice: random.Random) -> None:
    try:
        (page,) = blocks.reserve(1)
    except OutOfPages:
        return
    kept = blocks.seal(page, dice.choice(CHAIN), parent=None, exact=True, checksum=0)
    blocks.release([kept])


def test_long_chains_are_told_as_short_ones_are() -> None:
    draw = random.Random(3)
    chain = [BlockHash(draw.randbytes(16)) for _ in range(300)]
    index, held = BlockIndex(), {}
    for worker in range(150):
        held[f"w{worker}"] = draw.choice((0, 0, draw.randrange(300), 300))
        blocks = chain[: held[f"w{worker}"]] + [BlockHash(draw.randbytes(16)) for _ in range(30)]
        index.load_snapshot(f"w{worker}", 0, blocks)
    for name in ("w3", "w77"):
        index.forget(name)
        del held[name]
    index.load_snapshot("late", 0, chain[:260])
    held["late"] = 260
    for length in (20, 48, 49, 255, 300):
        told = index.longest_prefix(chain[:length])
        assert told == {worker: min(blocks, length) for worker, blocks in held.items() if blocks}
