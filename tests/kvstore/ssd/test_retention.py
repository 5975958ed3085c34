"""Who may come in and who goes; and how old blocks look after restarts, lost tables and clocks that jump."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from epdserve.kvstore.ssd.retention import (
    NO_PARENT,
    Admission,
    HeldBlocks,
    Mode,
    RetentionPolicy,
    Space,
    admit,
    plan_eviction,
)
from epdserve.kvstore.types import BlockHash
from hypothesis import given, settings
from hypothesis import strategies as st
from support.manual_clock import ManualClock
from support.ssd import OTHER, SLOT, TENANT, make_tier, name, put_of

HOUR = 3600
FLOOR = RetentionPolicy(floor_s=100)
BEST = RetentionPolicy(floor_s=100, mode=Mode.BEST_EFFORT)


def held(
    *blocks: tuple[int, int, int], tenant: tuple[int, ...] = (), reserve: tuple[int, ...] = ()
) -> HeldBlocks:
    """Blocks as (key, parent, last use); ``tenant`` per block, ``reserve`` lists keys."""
    keys, parents, uses = (np.array(column) for column in zip(*blocks, strict=True))
    return HeldBlocks(
        keys.astype(np.uint64),
        parents.astype(np.uint64),
        uses.astype(np.int64),
        np.array(tenant or [0] * len(keys), np.int64),
        np.isin(keys, np.array(reserve, np.int64)),
        np.arange(len(keys), dtype=np.uint64),
    )


def goes(blocks: HeldBlocks, policy: RetentionPolicy, *, now: int, wanted: int, **more: object) -> list[int]:
    plan = plan_eviction(blocks, policy, now_s=now, slots_wanted=wanted, **more)  # type: ignore[arg-type]
    return [int(blocks.key[index]) for index in plan.order]


def test_least_recently_used_leaves_go_first() -> None:
    blocks = held((1, 0, 10), (2, 1, 10), (3, 2, 10), (4, 0, 5), (5, 0, 20))
    assert goes(blocks, FLOOR, now=1000, wanted=3) == [4, 3, 2]


def test_of_chains_used_in_the_same_second_the_first_to_come_goes_whole_before_the_next() -> None:
    chains = [
        (10 * chain + at, 10 * chain + at - 1 if at > 1 else 0, 5)
        for chain in (3, 1, 2)
        for at in range(1, 5)
    ]
    assert goes(held(*chains), FLOOR, now=1000, wanted=6) == [34, 33, 32, 31, 14, 13]
    branches = held((1, 0, 5), (2, 1, 5), (3, 1, 5), (4, 0, 5))  # 1 is as late as 3
    assert goes(branches, FLOOR, now=1000, wanted=4) == [2, 3, 1, 4]


def test_a_parent_is_as_young_as_what_hangs_on_it() -> None:
    blocks = held((1, 0, 0), (2, 1, 0), (3, 2, 950), (4, 0, 800))
    assert goes(blocks, FLOOR, now=1000, wanted=4) == [4]


def test_nothing_younger_than_the_floor_goes_in_floor_mode() -> None:
    blocks = held((1, 0, 899), (2, 0, 900), (3, 0, 901))
    assert goes(blocks, FLOOR, now=1000, wanted=3) == [1, 2]
    plan = plan_eviction(held((3, 0, 901), (4, 0, 950)), FLOOR, now_s=1000, slots_wanted=2)
    assert (len(plan.order), plan.next_due_s) == (0, 1001)


def test_best_effort_takes_the_younger_and_says_how_many() -> None:
    plan = plan_eviction(held((1, 0, 899), (2, 0, 950), (3, 0, 960)), BEST, now_s=1000, slots_wanted=2)
    assert (plan.order.tolist(), plan.violations) == ([0, 1], 1)


def test_a_tenant_over_its_quota_gives_first() -> None:
    blocks = held((1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 0, 4), tenant=(0, 1, 0, 1))
    assert goes(blocks, FLOOR, now=1000, wanted=1, over_quota={1: 1}) == [2]
    assert goes(blocks, FLOOR, now=1000, wanted=0, over_quota={1: 9}) == [2, 4]
    assert goes(blocks, FLOOR, now=1000, wanted=3, over_quota={1: 1}) == [1, 2, 3]


def test_blocks_of_the_reserve_have_no_floor_but_go_only_for_the_reserve() -> None:
    blocks = held((1, 0, 990), (2, 0, 980), (3, 2, 985), reserve=(1, 2))
    assert goes(blocks, FLOOR, now=1000, wanted=3) == []
    assert goes(blocks, FLOOR, now=1000, wanted=3, reserve_wanted=2) == [1]  # a block of the floor hangs on 2


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 300)), min_size=1, max_size=30),
    st.integers(0, 30),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_plans_never_break_a_chain_or_the_floor(tree: list[tuple[int, int]], wanted: int, best: bool) -> None:
    blocks = held(*((i + 1, min(parent, i), use) for i, (parent, use) in enumerate(tree)))
    plan = plan_eviction(blocks, BEST if best else FLOOR, now_s=310, slots_wanted=wanted)
    gone: set[int] = set()
    for index in plan.order.tolist():
        key = int(blocks.key[index])
        children = {int(k) for k, p in zip(blocks.key, blocks.parent, strict=True) if int(p) == key}
        assert children <= gone
        gone.add(key)
        assert best or 310 - int(blocks.last_use[index]) >= 100
    assert len(gone) <= wanted
    assert not best or len(gone) == min(wanted, len(tree))
    assert plan.violations <= len(gone) * best


def test_long_chains_are_ordered_from_their_end() -> None:
    count = 8000
    chain = held(*((i + 1, i or NO_PARENT, 5) for i in range(count)))
    assert goes(chain, FLOOR, now=1000, wanted=count) == list(range(count, 0, -1))


@pytest.mark.parametrize(
    ("free", "used", "running", "stuck", "held_slots", "answer"),
    [
        (5, 0, False, False, 0, (Admission.ACCEPTED, False)),
        (2, 0, False, False, 0, (Admission.NO_SPACE, False)),  # two slots are the reserve
        (2, 0, False, True, 0, (Admission.FLOOR, False)),
        (2, 0, True, True, 0, (Admission.ACCEPTED, True)),
        (1, 1, True, True, 0, (Admission.ACCEPTED, True)),
        (1, 2, True, True, 0, (Admission.ACCEPTED, False)),  # the reserve is in use, the free slot is anybody's
        (0, 0, True, True, 0, (Admission.FLOOR, False)),
        (5, 0, False, False, 3, (Admission.QUOTA, False)),
        (5, 0, True, False, 3, (Admission.ACCEPTED, True)),
    ],
)  # fmt: skip
def test_admission(
    free: int, used: int, running: bool, stuck: bool, held_slots: int, answer: tuple[Admission, bool]
) -> None:
    policy = RetentionPolicy(reserve_ratio=0.1, quota_bytes={TENANT: 3 * SLOT})
    got = admit(
        Space(20, free, used),
        policy,
        tenant=TENANT,
        tenant_bytes=held_slots * SLOT,
        slot_bytes=SLOT,
        running=running,
        nothing_may_go=stuck,
    )
    assert got == answer


def test_impossible_policies_are_refused() -> None:
    for wrong in ({"reserve_ratio": 0.7}, {"low_free_ratio": 0.2, "high_free_ratio": 0.1}, {"floor_s": -1}):
        with pytest.raises(ValueError, match=r"impossible|negative"):
            RetentionPolicy(**wrong)


# --- the tier keeps time ---

DAYS = RetentionPolicy(reserve_ratio=0.0, low_free_ratio=0.3, high_free_ratio=0.3)
BLOCKS = [name(number) for number in range(4)]


def stored(tier_blocks: list[BlockHash], tmp_path: Path, clock: ManualClock, wall: float) -> None:
    tier = make_tier([tmp_path], slots=4, clock=clock, policy=DAYS, wall=wall)
    tier.open()
    tier.put_batch([put_of(block) for block in tier_blocks])
    tier.close()


def test_a_block_stays_72_hours_after_its_last_use(tmp_path: Path) -> None:
    clock = ManualClock()
    tier = make_tier([tmp_path], slots=4, clock=clock, policy=DAYS)
    tier.open()
    tier.put_batch([put_of(block) for block in BLOCKS])
    clock.advance(71 * HOUR)
    assert tier.sweep() == 0
    assert tier.try_put(put_of(name("more"))) is Admission.FLOOR
    tier.touch(BLOCKS[:2])
    clock.advance(HOUR)
    assert tier.sweep() == 2
    assert [tier.contains(block) for block in BLOCKS] == [True, True, False, False]
    assert tier.figures.achieved_age_seconds() == 72 * HOUR
    assert tier.try_put(put_of(name("more"))) is Admission.ACCEPTED
    tier.close()


@pytest.mark.parametrize("jump_s", [-(10**6), 10**8], ids=["back", "forward"])
def test_a_wall_clock_that_jumps_over_a_restart_takes_nobodys_time(tmp_path: Path, jump_s: int) -> None:
    clock = ManualClock()
    stored(BLOCKS, tmp_path, clock, wall=2e6)
    again = make_tier([tmp_path], slots=4, clock=clock, policy=DAYS, wall=2e6 + jump_s)
    again.open()
    clock.advance(70 * HOUR)
    assert again.sweep() == 0
    clock.advance(2 * HOUR + DAYS.last_use_step_s)
    assert again.sweep() == 2
    again.close()


def test_after_a_lost_table_last_use_counts_as_now(tmp_path: Path) -> None:
    clock = ManualClock()
    stored(BLOCKS, tmp_path, clock, wall=2e6)
    (tmp_path / "names.tbl").unlink()
    tier = make_tier([tmp_path], slots=4, clock=clock, policy=DAYS, wall=2e6 + 80 * HOUR)
    tier.open()
    assert tier.sweep() == 0
    assert tier.save_use() == 4
    clock.advance(71 * HOUR)
    assert tier.sweep() == 0
    clock.advance(HOUR)
    assert tier.sweep() == 2
    tier.close()


def test_last_use_outlives_a_restart_and_is_never_taken_for_older(tmp_path: Path) -> None:
    clock = ManualClock()
    tier = make_tier([tmp_path], slots=4, clock=clock, policy=DAYS)
    tier.open()
    tier.put_batch([put_of(block) for block in BLOCKS])
    clock.advance(70 * HOUR)
    tier.touch(BLOCKS[:2])
    assert tier.save_use() == 2
    clock.advance(DAYS.last_use_step_s - 1)
    tier.touch(BLOCKS[:2])
    assert tier.save_use() == 0
    tier.abandon()
    again = make_tier([tmp_path], slots=4, clock=clock, policy=DAYS)
    again.open()
    clock.advance(72 * HOUR - 1)
    assert again.sweep() == 2
    assert [again.contains(block) for block in BLOCKS] == [True, True, False, False]
    again.close()


def test_a_tenant_at_its_quota_is_refused_and_an_old_one_gives_way_to_itself(tmp_path: Path) -> None:
    clock = ManualClock()
    policy = RetentionPolicy(reserve_ratio=0.0, quota_bytes={TENANT: 2 * SLOT})
    tier = make_tier([tmp_path], slots=8, clock=clock, policy=policy)
    tier.open()
    assert tier.put_batch([put_of(block) for block in BLOCKS[:3]])[2] is Admission.QUOTA
    assert tier.put_batch([put_of(BLOCKS[3], tenant=OTHER)]) == [Admission.ACCEPTED]
    tier.close()
    tighter = RetentionPolicy(reserve_ratio=0.0, default_quota_bytes=SLOT)
    again = make_tier([tmp_path], slots=8, clock=clock, policy=tighter)
    again.open()
    clock.advance(73 * HOUR)
    assert again.sweep() == 1
    assert [again.contains(block) for block in BLOCKS] == [False, True, False, True]
    again.check(deep=True)
    again.close()


def test_the_reserve_takes_blocks_of_running_requests(tmp_path: Path) -> None:
    policy = RetentionPolicy(reserve_ratio=0.25, low_free_ratio=0.0, high_free_ratio=0.0)
    tier = make_tier([tmp_path], slots=8, policy=policy)
    tier.open()
    blocks = [name(number) for number in range(12)]
    results = tier.put_batch([put_of(block) for block in blocks[:7]])
    assert results == [Admission.ACCEPTED] * 6 + [results[6]]
    tier.sweep()
    assert tier.try_put(put_of(blocks[7])) is Admission.FLOOR
    assert tier.put_batch([put_of(blocks[8], running=True)]) == [Admission.ACCEPTED]
    assert tier.figures.reserve_used_slots() == 1
    tier.check(deep=True)
    tier.close()


def test_the_days_bytes_and_second_hits_gate_admission(tmp_path: Path) -> None:
    clock = ManualClock()
    tier = make_tier([tmp_path], clock=clock, settings={"bytes_per_day": 48 * SLOT, "second_hit_blocks": 2})
    tier.open()
    assert tier.try_put(put_of(BLOCKS[0])) is Admission.FIRST_SEEN
    assert tier.try_put(put_of(BLOCKS[0])) is Admission.ACCEPTED
    assert tier.try_put(put_of(BLOCKS[1], running=True)) is Admission.ACCEPTED
    assert tier.try_put(put_of(BLOCKS[2], running=True)) is Admission.BUDGET
    clock.advance(HOUR / 2)
    assert tier.try_put(put_of(BLOCKS[2], running=True)) is Admission.ACCEPTED
    for number in range(10, 13):  # more than is remembered
        assert tier.try_put(put_of(name(number))) is Admission.FIRST_SEEN
    assert tier.try_put(put_of(name(10))) is Admission.FIRST_SEEN
    tier.close()
