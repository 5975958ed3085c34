"""The step model of real pools: fitted from receipts, and simulated with."""

from dataclasses import replace

import pytest
from epdserve.loadtest.client import Outcome
from epdserve.loadtest.simulator.fitted import FittedTiming, fit, measured, simulated

TRUTH = FittedTiming(
    link_latency_s=0.02,
    prefill_fixed_s=0.05,
    prefill_token_s=0.001,
    decode_fixed_s=0.03,
    decode_request_s=0.01,
)


def outcome(at: float, prompt: int, tokens: int, *, step_s: float) -> Outcome:
    """As these steps would make it, on idle pools."""
    prefill_s = TRUTH.prefill_s(prompt, prompt)
    first = at + TRUTH.link_latency_s + prefill_s + step_s
    return Outcome(
        sent_at=at,
        text_at=[first + step_s * number for number in range(tokens)],
        ended_at=first + step_s * (tokens - 1),
        finish_reason="length",
        usage={"prompt_tokens": prompt, "completion_tokens": tokens},
        receipt={
            "tokens": {"computed": prompt},
            "ms": {"prefill": 1000 * prefill_s, "prefill_queue": 0.0},
        },
    )


def alone(count: int = 8) -> list[Outcome]:
    return [outcome(100.0 * n, 100 + 20 * n, 10 + n, step_s=TRUTH.decode_s(1, 0)) for n in range(count)]


def pairs(count: int = 4) -> list[Outcome]:
    both = [outcome(1e6 + 100.0 * n, 200, 40, step_s=TRUTH.decode_s(2, 0)) for n in range(count)]
    return both + both


def test_a_fit_finds_the_lines_that_made_the_figures() -> None:
    found = fit([*alone(), *pairs()])
    assert found.prefill_fixed_s == pytest.approx(0.05, rel=0.01)
    assert found.prefill_token_s == pytest.approx(0.001, rel=0.01)
    assert found.decode_s(1, 0) == pytest.approx(0.04, rel=0.01)
    assert found.decode_s(2, 0) == pytest.approx(0.05, rel=0.01)
    assert found.link_latency_s == pytest.approx(0.02, abs=0.006)  # the median's step was taken for one alone


def test_what_is_simulated_on_idle_pools_is_what_was_measured() -> None:
    real = measured(alone())
    virtual = simulated(alone(), TRUTH, prefills=1, decodes=1)
    assert virtual.ttft_p50_s == pytest.approx(real.ttft_p50_s, rel=0.02)
    assert virtual.tpot_p50_s == pytest.approx(real.tpot_p50_s, rel=0.02)
    assert virtual.tokens_per_s == pytest.approx(real.tokens_per_s, rel=0.02)


def test_requests_that_meet_wait_for_one_another() -> None:
    crowd = [outcome(0.0, 200, 40, step_s=TRUTH.decode_s(1, 0)) for _ in range(4)]
    virtual = simulated(crowd, TRUTH, prefills=1, decodes=1)
    assert virtual.ttft_mean_s > 2 * TRUTH.prefill_s(200, 200)
    assert virtual.tpot_p50_s > TRUTH.decode_s(2, 0)


def test_failures_and_answers_of_one_token_are_left_out() -> None:
    broken = Outcome(sent_at=0.0, error="429")
    short = outcome(0.0, 100, 1, step_s=0.04)
    assert measured([*alone(), broken, short]) == measured(alone())


def test_a_fit_finds_how_much_longer_steps_are_beside_one_another() -> None:
    """Every second prompt is computed while another request decodes: half as long again, and those steps 1.2 times."""
    seen, step_s = alone(), TRUTH.decode_s(1, 0)
    for number in range(12):
        at, prompt = 1e7 + 100.0 * number, 60 + 15 * number
        first = outcome(at, 100, 60, step_s=step_s)
        second = outcome(at + 1.0, prompt, 30, step_s=step_s)
        crowded_s = 1.5 * TRUTH.prefill_s(prompt, prompt)
        second.receipt["ms"]["prefill"] = 1000 * crowded_s
        second.text_at = [at + 20.0 + step_s * step for step in range(30)]
        began, ended = first.text_at[0], first.text_at[-1]
        first.text_at[-1] = began + (ended - began) + 0.2 * crowded_s
        seen += [first, second]
    found = fit(seen)
    assert found.prefill_beside == pytest.approx(1.5, abs=0.051)
    assert found.decode_beside == pytest.approx(1.2, abs=0.11)
    assert found.prefill_token_s == pytest.approx(0.001, rel=0.05)


def test_simulated_workers_that_share_cores_hold_each_other_up() -> None:
    overlapping = [outcome(0.5 * number, 200, 40, step_s=TRUTH.decode_s(1, 0)) for number in range(12)]
    apart = simulated(overlapping, TRUTH, prefills=1, decodes=1)
    shared = replace(TRUTH, prefill_beside=1.5, decode_beside=1.3)
    together = simulated(overlapping, shared, prefills=1, decodes=1)
    assert together.ttft_mean_s > 1.2 * apart.ttft_mean_s
    assert 1.05 < together.tpot_p50_s / apart.tpot_p50_s <= 1.3
    again = simulated(alone(), shared, prefills=1, decodes=1)
    assert again == simulated(alone(), TRUTH, prefills=1, decodes=1)
