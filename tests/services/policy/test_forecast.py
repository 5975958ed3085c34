from __future__ import annotations

import pytest
from epdserve.services.policy.forecast import LengthForecast, byte_seconds, fixed


def test_byte_seconds_are_the_integral_of_a_growing_context() -> None:
    held = byte_seconds(fixed(100), prompt_tokens=1000, bytes_per_token=890, s_per_token=0.02)
    summed = sum(890 * (1000 + step + 0.5) * 0.02 for step in range(100))
    assert held == pytest.approx(summed)


def test_long_answers_count_more_than_the_mean_length_says() -> None:
    spread = LengthForecast(1, 1999, (1.0, 1999.0))
    both = [
        byte_seconds(one, prompt_tokens=0, bytes_per_token=1, s_per_token=1) for one in (spread, fixed(1000))
    ]
    assert both[0] > 1.9 * both[1]


def test_what_is_left_is_that_of_the_answers_that_are_still_possible() -> None:
    forecast = LengthForecast(10, 400, (10, 20, 400))
    assert forecast.remaining(0) == pytest.approx(430 / 3)
    assert forecast.remaining(30) == 370
    assert forecast.remaining(4000) == 1000


@pytest.mark.parametrize("points", [(), (1.0,)])
def test_impossible_forecasts_are_refused(points: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        LengthForecast(0.0 if points else 1.0, 1.0, points)
