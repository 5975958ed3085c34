"""The prefill bench runs each way and tells ratios of neighbours."""

import pytest
from epdserve.services.local.prefill_bench import WAYS, PrefillRates, narrow_runner, prefill_rates


def test_every_way_runs_and_gives_its_pages_back() -> None:
    runner = narrow_runner(192)
    rates = prefill_rates(runner, prompt_tokens=192, chunk_tokens=100, rounds=1)
    assert set(rates.seconds) == set(WAYS)
    assert runner.leaked_pages() == 0


def test_ratios_are_of_rounds() -> None:
    rates = PrefillRates(8, 8, {"served": [1, 2, 4], "every row": [2, 4, 8], "deterministic": [1.1, 2, 5]})
    assert rates.ratio("every row") == 2
    assert rates.ratio("deterministic") == pytest.approx(1.1)
    assert dict(rates.rows())["deterministic: prefill throughput lost"] == "9.1 %"
