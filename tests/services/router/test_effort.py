from __future__ import annotations

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.effort import resolve_effort
from epdserve.services.types import Effort


@pytest.mark.parametrize(
    ("effort", "level"),
    [
        (None, 75),
        ("minimal", 50),
        ("low", 50),
        ("medium", 75),
        ("high", 75),
        ("xhigh", 75),
        ("max", 100),
        ("ultra", 100),
        (1, 1),
        (60, 60),
        (100, 100),
    ],
)
def test_names_and_numbers(effort: str | int | None, level: int) -> None:
    assert resolve_effort(thinking=None, effort=effort) == Effort(level)
    assert resolve_effort(thinking="adaptive", effort=effort) == Effort(level)


def test_none_turns_thinking_off_unless_it_was_asked_for() -> None:
    assert resolve_effort(thinking=None, effort="none") is None
    assert resolve_effort(thinking="enabled", effort="none") == Effort(75)


def test_disabled_wins_over_any_effort() -> None:
    assert resolve_effort(thinking="disabled", effort="max") is None


def test_the_default_can_be_no_thinking() -> None:
    assert resolve_effort(thinking=None, effort=None, default_thinking=False) is None
    assert resolve_effort(thinking=None, effort="low", default_thinking=False) == Effort(50)


@pytest.mark.parametrize("effort", ["bogus", "", "60", 0, 101, -1])
def test_unknown_efforts_are_refused_even_without_thinking(effort: str | int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_effort(thinking="disabled", effort=effort)
    assert caught.value.param == "reasoning_effort"


def test_unknown_switches_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_effort(thinking="on", effort=None)
    assert caught.value.param == "thinking"
