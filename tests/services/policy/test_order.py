from __future__ import annotations

from random import Random

import pytest
from epdserve.services.policy.forecast import fixed
from epdserve.services.policy.order import Running, WaitingPrompt, next_prompt, preemption_victim, rank
from hypothesis import given
from hypothesis import strategies as st


def waiting(name: str, **changes: float) -> WaitingPrompt:
    fields = {"arrived_at": 0.0, "target_s": 2.0, "left_s": 0.1, **changes}
    return WaitingPrompt(name, **fields)  # type: ignore[arg-type]


def test_a_short_prompt_passes_a_long_one() -> None:
    assert next_prompt([waiting("long", left_s=1.0), waiting("short")], now=0.1) == "short"


def test_a_long_one_goes_before_new_short_ones_when_its_time_runs_out() -> None:
    long = waiting("long", left_s=1.0)
    assert next_prompt([long, waiting("short", arrived_at=0.95)], now=0.96) == "long"


def test_what_is_late_anyway_lets_the_others_pass_but_not_for_ever() -> None:
    late = waiting("late", left_s=1.0)
    assert next_prompt([late, waiting("new", arrived_at=1.9)], now=2.0) == "new"
    assert next_prompt([late, waiting("new", arrived_at=8.9)], now=9.0) == "late"


def test_priority_comes_first_and_names_break_ties() -> None:
    assert next_prompt([waiting("b"), waiting("a")], now=0.0) == "a"
    assert next_prompt([waiting("a"), waiting("b", priority=1)], now=0.0) == "b"


def test_the_starved_go_before_any_priority() -> None:
    starved = waiting("starved", left_s=9.0)
    assert next_prompt([starved, waiting("first", arrived_at=8.9, priority=9)], now=9.0) == "starved"
    assert next_prompt([starved, waiting("first", arrived_at=7.9, priority=9)], now=7.9) == "first"


def test_a_tenant_above_its_share_goes_behind_and_its_priority_does_not_count() -> None:
    assert next_prompt([waiting("a", excess=1.0), waiting("b", left_s=0.15)], now=0.0) == "b"
    assert next_prompt([waiting("a", excess=1.0, priority=9), waiting("b")], now=0.0) == "b"
    assert next_prompt([waiting("a", excess=0.05, priority=9), waiting("b")], now=0.0) == "a"


prompts = st.builds(
    WaitingPrompt,
    st.text("abc", min_size=1, max_size=3),
    st.floats(0, 100),
    st.floats(0.01, 100),
    st.floats(0, 100),
    st.integers(-100, 100),
    st.floats(-1, 10),
)


@given(st.lists(prompts, min_size=1, max_size=8), st.floats(0, 1000), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_the_queue(
    queue: list[WaitingPrompt], now: float, random: Random
) -> None:
    shuffled = random.sample(queue, len(queue))
    assert next_prompt(queue, now=now) == next_prompt(shuffled, now=now)


@given(prompts, prompts)
def test_all_that_has_waited_four_targets_goes_before_all_that_has_not(
    one: WaitingPrompt, other: WaitingPrompt
) -> None:
    now = max(one.arrived_at, other.arrived_at) + 1
    starved = [now - prompt.arrived_at > 4 * prompt.target_s for prompt in (one, other)]
    if starved == [True, False]:
        assert rank(one, now=now) < rank(other, now=now)


def test_nothing_starves_under_an_endless_stream_of_short_ones() -> None:
    now, done_at = 0.0, None
    long_left = 1.0
    while done_at is None and now < 60:
        queue = [waiting("long", left_s=long_left), waiting(f"s{now}", arrived_at=now - 0.01)]
        if next_prompt(queue, now=now) == "long":
            long_left -= 0.1
            done_at = now if long_left <= 0 else None
        now += 0.1
    assert done_at is not None
    assert done_at < 12


def test_the_victim_is_who_would_hold_its_memory_longest() -> None:
    near_end = Running("near", 1000, 990, fixed(1000))
    far = Running("far", 1000, 10, fixed(1000))
    assert preemption_victim([near_end, far]) == "far"
    assert preemption_victim([far, Running("low", 1000, 990, fixed(1000), priority=-1)]) == "low"


def test_nobody_is_an_error() -> None:
    with pytest.raises(ValueError, match="waits"):
        next_prompt([], now=0.0)
    with pytest.raises(ValueError, match="preempt"):
        preemption_victim([])
