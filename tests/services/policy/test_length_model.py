from __future__ import annotations

import math
import random

import pytest
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.length_model import LengthModel, LengthSettings, PromptClass


def asked(rng: random.Random, *, tenant: str | None = None) -> PromptClass:
    return PromptClass(
        rng.choice([25, 50, 75, 100]),
        tenant or rng.choice("abcd"),
        int(math.exp(rng.gauss(8, 1.3))),
        rng.random() < 0.5,
        rng.choice([1, 3, 7]),
    )


def length(rng: random.Random, prompt: PromptClass, scale: float) -> int:
    own = {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0}.get(prompt.tenant, 1.0)
    return max(1, int(scale * own * 300 * 2 ** ((prompt.effort - 75) / 25) * math.exp(rng.gauss(0, 0.8))))


def covered(model: LengthModel, rng: random.Random, requests: int, scale: float) -> float:
    inside = 0
    for _ in range(requests):
        prompt = asked(rng)
        tokens = length(rng, prompt, scale)
        forecast = model.forecast(prompt)
        inside += forecast.low <= tokens <= forecast.high
        model.observe(prompt, tokens, forecast=forecast)
    return inside / requests


def test_it_says_anything_before_it_knows_anything() -> None:
    forecast = LengthModel().forecast(PromptClass(50, "a", 100))
    assert forecast.low < 8
    assert forecast.high > 5000
    assert forecast.mean < 10_000


@pytest.mark.parametrize("seed", range(2))
def test_the_interval_holds_four_of_five_after_500_requests_and_after_shifts(seed: int) -> None:
    model, rng = LengthModel(), random.Random(seed)
    for scale in (1.0, 4.0, 0.5):
        covered(model, rng, 500, scale)
        assert 0.75 <= covered(model, rng, 400, scale) <= 0.85
    assert 0.7 <= model.calibration.recent_coverage <= 0.9
    assert model.calibration.answers == 2700


def test_effort_and_tenant_are_told_apart() -> None:
    model, rng = LengthModel(), random.Random(5)
    covered(model, rng, 800, 1.0)
    low, high = (model.forecast(PromptClass(effort, "a", 3000)).mean for effort in (25, 100))
    assert high > 3 * low
    brief, wordy = (model.forecast(PromptClass(75, tenant, 3000)).mean for tenant in "bc")
    assert wordy > 2 * brief


def test_a_tenant_that_is_new_gets_what_its_effort_gets() -> None:
    model, rng = LengthModel(), random.Random(6)
    covered(model, rng, 1000, 1.0)
    known = model.forecast(PromptClass(100, "a", 3000, True)).mean
    assert 0.3 < model.forecast(PromptClass(100, "new", 3000, True)).mean / known < 3


def test_memory_is_bounded_whatever_tenants_come() -> None:
    model = LengthModel(LengthSettings(max_cells=64))
    for number in range(500):
        model.observe(PromptClass(100, f"tenant{number}", 10**6), 10)
    assert model.cells <= 64
    assert model.forecast(PromptClass(100, "other", 10**6)).high < 40


def test_replicas_learn_from_each_other_and_a_repeated_snapshot_changes_nothing() -> None:
    teacher, pupil, rng = LengthModel(), LengthModel(), random.Random(7)
    covered(teacher, rng, 600, 1.0)
    prompt = PromptClass(100, "c", 3000)
    before = pupil.forecast(prompt)
    pupil.merge("teacher", teacher.snapshot())
    once = pupil.forecast(prompt)
    pupil.merge("teacher", teacher.snapshot())
    assert pupil.forecast(prompt) == once
    assert once.high - once.low < before.high - before.low
    assert abs(math.log2(once.mean / teacher.forecast(prompt).mean)) < 0.1


@pytest.mark.parametrize("counts", [(1.0,), (-1.0,) * 80, (float("nan"),) * 80])
def test_a_snapshot_that_is_none_is_refused(counts: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="histogram"):
        LengthModel().merge("liar", {("e1",): counts})


def test_a_liar_among_replicas_weighs_no_more_than_a_window() -> None:
    model, prompt = LengthModel(), PromptClass(100, "a", 3000, True)
    for _ in range(300):
        model.observe(prompt, 600)
    before = model.forecast(prompt).mean
    model.merge("liar", {key: (1e12,) + (0.0,) * 79 for key in prompt.cells()})
    assert model.forecast(prompt).mean > before / 2.5


def test_answers_that_were_cut_count_as_longer() -> None:
    cut, ended, prompt = LengthModel(), LengthModel(), PromptClass(100, "a", 10)
    for _ in range(100):
        cut.observe(prompt, 256, cut=True)
        ended.observe(prompt, 256)
    assert cut.forecast(prompt).mean > 2 * ended.forecast(prompt).mean
    assert cut.calibration.answers == 0


def test_forecasts_are_capped_by_what_the_request_allows() -> None:
    forecast = LengthForecast(10, 1000, (10, 100, 1000)).capped(50)
    assert (forecast.low, forecast.high, forecast.points) == (10, 50, (10, 50, 50))
