import random
from collections import defaultdict

import numpy as np
import pytest
from epdserve.kvstore import holder_table
from epdserve.kvstore.holder_table import HolderTable
from epdserve.kvstore.set_digest import set_digest
from epdserve.kvstore.types import BlockHash

ZERO_PAIR = BlockHash(holder_table._TURN.to_bytes(8, "little") + bytes(8))


def hashes(count: int, seed: int = 0) -> list[BlockHash]:
    joined = np.random.default_rng(seed).bytes(16 * count)
    return [BlockHash(joined[16 * i : 16 * i + 16]) for i in range(count)]


def crowded(number: int) -> BlockHash:
    """Hashes that all begin to probe at the table's last slot, so that most run over its end."""
    low = (number << 40 | 0xFFFFFFFFFF) ^ holder_table._TURN & 0xFFFFFFFFFF
    return BlockHash(low.to_bytes(8, "little") + bytes(8))


def prefix_lengths(model: dict[BlockHash, set[int]], chain: list[BlockHash]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    alive = set().union(*model.values())
    for length, name in enumerate(chain, start=1):
        alive &= model[name]
        lengths.update(dict.fromkeys(alive, length))
    return lengths


@pytest.mark.parametrize("names", [hashes(60), [crowded(n) for n in range(60)]], ids=["random", "crowded"])
@pytest.mark.parametrize("holders", [(0, 1, 2), (0, 63, 64, 200)], ids=["one word", "four words"])
@pytest.mark.parametrize("bulk", [1, 1000], ids=["bulk", "loop"])
def test_random_steps_agree_with_a_dictionary_of_sets(
    names: list[BlockHash], holders: tuple[int, ...], bulk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_table, "_BULK", bulk)
    monkeypatch.setattr(holder_table, "_MIN_CAPACITY", 8)
    dice, table = random.Random(7), HolderTable()
    model: dict[BlockHash, set[int]] = defaultdict(set)
    for _ in range(400):
        holder, some = dice.choice(holders), dice.choices(names, k=dice.randrange(1, 12))
        step = dice.random()
        if step < 0.5:
            table.add(holder, some)
            for name in some:
                model[name].add(holder)
        elif step < 0.95:
            table.discard(holder, some)
            for name in some:
                model[name].discard(holder)
        else:
            table.clear(holder)
            for held in model.values():
                held.discard(holder)
        assert list(table.holders(names)) == [sum(1 << holder for holder in model[name]) for name in names]
        assert len(table) == sum(1 for held in model.values() if held)
        for one in holders:
            assert table.digest(one) == set_digest([name for name in model if one in model[name]])
        length = dice.randrange(1, len(names))
        assert table.prefix_lengths(names[:length]) == prefix_lengths(model, names[:length])
        assert table._used <= holder_table._MAX_LOAD * (table._mask + 1)


def test_steady_churn_does_not_grow_the_table() -> None:
    table, names = HolderTable(), hashes(20_000)
    for start in range(0, 19_500, 100):
        table.add(0, names[start : start + 100])
        table.discard(0, names[max(0, start - 300) : max(0, start - 200)])
    assert len(table) <= 400
    assert table.nbytes == HolderTable().nbytes


def test_it_grows_and_shrinks_with_its_content_and_stays_under_a_hundred_bytes_a_block() -> None:
    table, names = HolderTable(), hashes(100_000)
    empty = table.nbytes
    for start in range(0, len(names), 1000):
        table.add(start // 1000 % 3, names[start : start + 1000])
        assert table.nbytes <= max(empty, 100 * len(table))
    assert len(table) == len(names)
    for holder in range(3):
        table.clear(holder)
    assert len(table) == 0
    assert table.nbytes == empty


def test_a_snapshot_may_repeat_itself_and_what_is_known() -> None:
    table, names = HolderTable(), hashes(6000)
    table.add(1, names[:10])
    table.add(0, [*names, *names[::-1]])
    assert len(table) == 6000
    assert list(table.holders([names[5], names[50]])) == [3, 1]


def test_hashes_of_another_length_are_unknown() -> None:
    table, (name,) = HolderTable(), hashes(1)
    odd = [BlockHash(b"short"), name, BlockHash(b"longer than sixteen")]
    table.add(0, odd)
    assert len(table) == 1
    assert list(table.holders(odd)) == [0, 1, 0]
    table.discard(0, odd)
    assert len(table) == 0


def test_the_one_hash_that_looks_like_an_empty_slot_is_never_remembered() -> None:
    table = HolderTable()
    for bulk in (False, True):
        table.add(0, [ZERO_PAIR] * (holder_table._BULK if bulk else 1))
        assert list(table.holders([ZERO_PAIR])) == [0]
        assert len(table) == 0


def test_discarding_for_a_holder_never_seen_changes_nothing() -> None:
    table, names = HolderTable(), hashes(3)
    table.add(0, names)
    table.discard(99, names)
    table.clear(99)
    assert len(table) == 3


def test_a_chain_of_which_everything_or_a_low_word_is_odd_is_looked_up_all_the_same() -> None:
    table, chain = HolderTable(), hashes(200)
    twin = BlockHash(chain[7][:8] + bytes(8))  # the low word of another block
    zero_low = BlockHash(holder_table._TURN.to_bytes(8, "little") + b"x" * 8)
    odd = [*chain[:50], ZERO_PAIR, *chain[50:]]
    table.add(0, [twin, *chain, zero_low])
    table.add(130, [zero_low, *chain[:100]])
    assert table.prefix_lengths(chain) == {0: 200, 130: 100}
    assert table.prefix_lengths(odd) == {0: 50, 130: 50}
    assert table.prefix_lengths([twin, *chain]) == {0: 201}
    assert table.prefix_lengths([zero_low, *chain]) == {0: 201, 130: 101}
    assert table.prefix_lengths([BlockHash(b"short"), *chain]) == {}
    assert table.prefix_lengths(hashes(60, seed=9)) == {}
