import random
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from epdserve.kvstore import holder_table
from epdserve.kvstore.holder_table import HolderTable
from epdserve.kvstore.set_digest import set_digest
from epdserve.kvstore.types import BlockHash
from support import native

SOURCE = Path(holder_table.__file__).with_name("prefix_lookup.c")
NAMES = [str(number) for number in range(256)]
ZERO_PAIR = BlockHash(holder_table._TURN.to_bytes(8, "little") + bytes(8))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return native.compiled(SOURCE, "_prefix_lookup", tmp_path_factory.mktemp("native"))


@pytest.fixture(params=["native", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    way = request.getfixturevalue("compiled") if request.param == "native" else None
    monkeypatch.setattr(holder_table, "_native", way)


def hashes(count: int, seed: int = 0) -> list[BlockHash]:
    joined = np.random.default_rng(seed).bytes(16 * count)
    return [BlockHash(joined[16 * i : 16 * i + 16]) for i in range(count)]


def crowded(number: int) -> BlockHash:
    """Hashes that all begin to probe at the table's last slot, so that most run over its end."""
    low = (number << 40 | 0xFFFFFFFFFF) ^ holder_table._TURN & 0xFFFFFFFFFF
    return BlockHash(low.to_bytes(8, "little") + bytes(8))


def lengths_in(table: HolderTable, chain: list[BlockHash]) -> dict[int, int]:
    return {int(name): length for name, length in table.prefix_lengths(chain, NAMES).items()}


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
        assert lengths_in(table, names[:length]) == prefix_lengths(model, names[:length])
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
    assert lengths_in(table, chain) == {0: 200, 130: 100}
    assert lengths_in(table, odd) == {0: 50, 130: 50}
    assert lengths_in(table, [twin, *chain]) == {0: 201}
    assert lengths_in(table, [zero_low, *chain]) == {0: 201, 130: 101}
    assert lengths_in(table, [BlockHash(b"short"), *chain]) == {}
    assert lengths_in(table, hashes(60, seed=9)) == {}


def test_both_ways_agree_on_chains_with_gaps(compiled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    dice, table, chain = random.Random(3), HolderTable(), hashes(300)
    for holder in range(200):
        held = chain[: dice.randrange(300)]
        table.add(holder, held)
        table.discard(holder, dice.sample(held, min(len(held), dice.randrange(3))))
    some: list[list[BlockHash]] = [chain[:count] for count in (0, 1, 2, 23, 24, 25, 47, 48, 49, 300)]
    for asked in [*some, chain[7:], hashes(60, seed=5), [*chain[:30], BlockHash(b"odd"), *chain[30:]]]:
        found = []
        for way in (compiled, None):
            monkeypatch.setattr(holder_table, "_native", way)
            found.append(lengths_in(table, asked))
        assert found[0] == found[1]


def test_the_native_way_refuses_what_is_no_table(compiled: ModuleType) -> None:
    words, chain = np.zeros(24, np.uint64), hashes(1)
    assert compiled.prefix_lengths(words, 0, 3, 7, 0, chain, NAMES) == {}
    for base, stride, mask in [
        (0, 3, 6),
        (0, 3, 15),
        (1, 3, 7),
        (-1, 3, 7),
        (0, 2, 7),
        (0, 1 << 40, 0),
        (0, 3, -1),
    ]:
        with pytest.raises(ValueError, match="power of two"):
            compiled.prefix_lengths(words, base, stride, mask, 0, chain, NAMES)
    with pytest.raises(TypeError):
        compiled.prefix_lengths(words, 0, 3, 7, 0, ["text"], NAMES)
    full = np.full(24, np.uint64(2**64 - 1))
    with pytest.raises(IndexError):
        compiled.prefix_lengths(full, 0, 3, 7, 0, [BlockHash(b"\xff" * 16)], NAMES[:3])
