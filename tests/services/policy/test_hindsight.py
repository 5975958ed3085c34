from __future__ import annotations

import pytest
from epdserve.services.policy.hindsight import Hindsight


def told(hindsight: Hindsight, name: str, *, ttft_s: float = 1.0, tpot_s: float = 0.05) -> None:
    hindsight.expect(name, ttft_s=ttft_s, tpot_s=tpot_s, ttft_target_s=2.0, tpot_target_s=0.05)


def test_what_is_off_all_the_time_is_corrected_and_follows_a_change() -> None:
    hindsight = Hindsight()
    assert (hindsight.ttft, hindsight.tpot) == (1.0, 1.0)
    for factor in (3.0, 0.5, 1.1, 1.6, 1.35):
        for n in range(60):
            told(hindsight, str(n))
            hindsight.began(str(n), factor)
            hindsight.ended(str(n), 0.05 * factor)
        # What came sooner than expected is no reason to let in more, and a little later none to let in less
        corrected = {0.5: 1.0, 1.1: 1.0, 1.35: 1.25}.get(factor, factor)
        assert hindsight.ttft == pytest.approx(corrected, rel=0.02)
        assert hindsight.tpot == pytest.approx(corrected, rel=0.02)


def test_idle_workers_teach_nothing() -> None:
    hindsight = Hindsight()
    for n in range(60):
        told(hindsight, str(n), ttft_s=0.001, tpot_s=0.000_1)
        hindsight.began(str(n), 0.15)  # of a target of 2 s
        hindsight.ended(str(n), 0.004)
    assert (hindsight.ttft, hindsight.tpot) == (1.0, 1.0)


def test_one_request_cannot_close_the_door() -> None:
    hindsight = Hindsight()
    told(hindsight, "r")
    hindsight.began("r", 1e6)
    assert hindsight.ttft < 4.5
    for n in range(100):
        told(hindsight, str(n))
        hindsight.began(str(n), 1e6)
    assert hindsight.ttft == pytest.approx(16.0, rel=0.3)


def test_what_is_not_known_and_what_was_one_token_is_passed_over() -> None:
    hindsight = Hindsight()
    hindsight.began("never", 9.0)
    told(hindsight, "r")
    hindsight.ended("r", None)
    hindsight.ended("r", 9.0)
    assert (hindsight.ttft, hindsight.tpot) == (1.0, 1.0)


def test_refusals_fade_a_correction_that_nobody_is_let_in_to_renew() -> None:
    hindsight = Hindsight()
    for n in range(100):
        told(hindsight, str(n))
        hindsight.began(str(n), 8.0)
    assert hindsight.ttft > 7
    for _ in range(60):
        hindsight.refused()
    assert 1.0 < hindsight.ttft < 2.0
    for _ in range(200):
        hindsight.refused()
    assert (hindsight.ttft, hindsight.tpot) == (1.0, 1.0)
