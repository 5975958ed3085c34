"""The mixed load of real pools, without a server."""

import pytest
from epdserve.loadtest.client import Outcome
from epdserve.loadtest.pool_load import EFFORTS, Targets, mixed


def test_the_same_seed_says_the_same_and_every_effort_is_asked_for() -> None:
    bodies = mixed("m", 200, seed=3)
    assert bodies == mixed("m", 200, seed=3)
    assert {body["reasoning_effort"] for body in bodies} == set(EFFORTS)
    mean = {e: sum(b["max_tokens"] for b in bodies if b["reasoning_effort"] == e) for e in EFFORTS}
    assert mean[25] < mean[50] < mean[75] < mean[100]


@pytest.mark.parametrize(("shared", "beginnings"), [(True, 12), (False, 200)])
def test_prompts_begin_alike_where_they_are_to(shared: bool, beginnings: int) -> None:
    bodies = mixed("m", 200, seed=3, shared=shared)
    assert len({body["messages"][0]["content"] for body in bodies}) == beginnings


def test_targets_are_met_by_both_or_not_at_all() -> None:
    def took(first: float, each: float, *, error: str | None = None) -> Outcome:
        times = [first, first + each, first + 2 * each]
        usage = {"completion_tokens": 3}
        return Outcome(0.0, times, times[-1], finish_reason="length", usage=usage, error=error)

    targets = Targets(1.0, 0.1)
    assert targets.met(took(1.0, 0.09))
    assert not targets.met(took(1.1, 0.1))
    assert not targets.met(took(1.0, 0.11))
    assert not targets.met(took(0.5, 0.05, error="429"))
