import pytest
from epdserve.services.engine.chunks import first_come, share_budget
from hypothesis import given
from hypothesis import strategies as st


def test_prompt_alone_gets_the_whole_budget() -> None:
    assert share_budget([1000], budget=256) == [256]


def test_short_prompts_end_beside_a_long_one() -> None:
    assert share_budget([1000, 20, 50], budget=256) == [186, 20, 50]


def test_equal_prompts_share_equally_and_the_first_take_the_rest() -> None:
    assert share_budget([100, 100, 100], budget=32) == [11, 11, 10]


def test_more_prompts_than_budget_serves_the_first_ones() -> None:
    assert share_budget([5] * 4, budget=2) == [1, 1, 0, 0]


@given(st.lists(st.integers(1, 500), max_size=12), st.integers(1, 600))
def test_budget_is_used_and_never_exceeded(remaining: list[int], budget: int) -> None:
    shares = share_budget(remaining, budget=budget)
    assert sum(shares) == min(budget, sum(remaining))
    assert all(0 <= share <= left for share, left in zip(shares, remaining, strict=True))
    fair = budget // len(remaining) if remaining else 0
    assert all(share >= min(left, fair) for share, left in zip(shares, remaining, strict=True))


def test_empty_work_is_refused() -> None:
    with pytest.raises(ValueError, match="without rows"):
        share_budget([3, 0], budget=4)
    with pytest.raises(ValueError, match="budget of 0"):
        share_budget([3], budget=0)


@given(st.lists(st.integers(1, 500), max_size=9), st.integers(1, 600))
def test_in_order_of_urgency_nobody_gets_a_row_before_the_one_in_front_has_all(
    remaining: list[int], budget: int
) -> None:
    shares = first_come(remaining, budget=budget)
    assert sum(shares) == min(budget, sum(remaining))
    short = [index for index, left in enumerate(remaining) if shares[index] < left]
    assert all(shares[index] == 0 for index in short[1:])


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="budget"):
        first_come([1], budget=0)
