from __future__ import annotations

from epdserve.loadtest.pool_bench import interval


def test_the_interval_holds_the_ratio_and_is_wider_where_rounds_differ() -> None:
    low, high = interval([20, 21, 19, 20], [10, 10, 10, 10])
    assert 1.9 <= low <= 2.0 <= high <= 2.1
    wild_low, wild_high = interval([5, 40, 5, 40], [10, 10, 10, 10])
    assert wild_low < 1 < wild_high


def test_nothing_in_time_is_not_divided_by() -> None:
    assert interval([3, 3], [0, 0]) == (6.0, 6.0)
