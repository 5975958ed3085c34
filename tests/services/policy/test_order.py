from __future__ import annotations

import pytest
from epdserve.services.policy.forecast import fixed
from epdserve.services.policy.order import Running, WaitingPrompt, next_prompt, preemption_victim


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
