from __future__ import annotations

from epdserve.services.policy.health import Seen, faded, trouble_s


def test_a_healthy_worker_is_no_trouble() -> None:
    assert trouble_s(Seen(heartbeat_age_s=0.6, step_age_s=2.0, usual_step_s=1.0, calls=100)) == 0.0


def test_a_hanging_step_is_avoided_long_before_any_deadline() -> None:
    assert trouble_s(Seen(step_age_s=6.0, usual_step_s=0.05)) > 5.0


def test_silence_and_failures_add_up_and_draining_ends_it() -> None:
    silent = trouble_s(Seen(heartbeat_age_s=4.0))
    failing = trouble_s(Seen(failures=20.0, calls=20.0))
    assert silent == 2.5
    assert failing == 2.0
    assert trouble_s(Seen(heartbeat_age_s=4.0, failures=20.0, calls=20.0)) == silent + failing
    assert trouble_s(Seen(draining=True)) > 1e5


def test_one_failure_is_no_verdict_and_all_failures_are_finite() -> None:
    assert trouble_s(Seen(failures=1.0, calls=1.0)) < 0.2
    assert trouble_s(Seen(failures=1e9, calls=1e9)) < 1e6


def test_counts_fade() -> None:
    assert faded(8.0, elapsed_s=20.0, half_life_s=10.0) == 2.0
    assert faded(8.0, elapsed_s=-5.0) == 8.0
