from __future__ import annotations

import pytest
from epdserve.services.policy.admission import AdmissionLimits, AdmissionLoad, retry_after_s

LIMITS = AdmissionLimits(max_requests=4, max_tokens=1000)


def test_there_is_room_below_both_limits() -> None:
    assert retry_after_s(AdmissionLoad(3, 900, 5.0), LIMITS, prompt_tokens=100) is None


def test_the_request_limit_refuses_with_the_time_until_one_leaves() -> None:
    assert retry_after_s(AdmissionLoad(4, 10, 20.0), LIMITS, prompt_tokens=1) == 5


def test_the_token_limit_refuses_too() -> None:
    assert retry_after_s(AdmissionLoad(1, 950, 7.5), LIMITS, prompt_tokens=51) == 8


def test_an_empty_house_takes_any_prompt() -> None:
    assert retry_after_s(AdmissionLoad(0, 0, 0.0), LIMITS, prompt_tokens=100_000) is None


@pytest.mark.parametrize(("mean_stay_s", "expected"), [(0.0, 1), (1e9, 60)])
def test_the_wait_stays_between_a_second_and_a_minute(mean_stay_s: float, expected: int) -> None:
    assert retry_after_s(AdmissionLoad(4, 0, mean_stay_s), LIMITS, prompt_tokens=1) == expected


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="limits"):
        AdmissionLimits(0, 1)
