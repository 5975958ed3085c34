"""Figures of records, and records as a file."""

from dataclasses import replace
from pathlib import Path

import pytest
from epdserve.loadtest.client import Outcome
from epdserve.loadtest.results.analysis import Prices, by_tier, over_time, rates_over_time, summarise
from epdserve.loadtest.results.record import Ending, Record, Results, Slo, ending_of, facts_of
from support.loads import record, results


def test_goodput_counts_what_was_whole_and_in_time() -> None:
    records = [
        record(ttft_s=0.1),
        record(ttft_s=3.0),
        record(ttft_s=0.1, tpot_s=0.5),
        record(ending=Ending.REFUSED, expected=False),
        record(ending=Ending.LEFT),
    ]
    one = summarise(records, 10.0, Slo(1.0, 0.1))
    assert one.goodput_per_s == pytest.approx(0.1)
    assert one.in_time_ratio == pytest.approx(1 / 4)  # who left is nobody's failure
    assert one.unexpected == 1
    assert one.endings == {"ok": 3, "refused": 1, "left": 1}


def test_nonsense_that_was_refused_is_not_in_the_goodput_s_denominator() -> None:
    records = [record(), record(ending=Ending.REJECTED)]
    assert summarise(records, 1.0, Slo()).in_time_ratio == 1.0


def test_cost_is_told_by_hits_misses_and_answers() -> None:
    one = summarise([record(prompt_tokens=100, cached_tokens=60)], 1.0, Slo(), Prices(1.0, 10.0, 100.0))
    assert one.cost == pytest.approx((60 * 1 + 40 * 10 + 8 * 100) / 1e6)


def test_windows_hold_what_was_asked_for_in_them() -> None:
    run = results([record(at_s=0.1 * n, ttft_s=0.01 * n) for n in range(100)], elapsed_s=10.0)
    series = over_time(run, lambda one: [one.ttft_s])
    assert len(series.at_s) == 24
    assert list(series.p50) == sorted(series.p50)
    assert all(p50 <= p90 <= p99 for p50, p90, p99 in zip(series.p50, series.p90, series.p99, strict=True))
    at, rates = rates_over_time(run)
    assert sum(rates["sent"]) * (at[1] - at[0]) == pytest.approx(100)


def test_tiers_are_told_with_their_cost() -> None:
    records = [
        record(tiers={"device": 90, "computed": 10}, prefill_ms=1.0),
        record(tiers={"computed": 100}, prefill_ms=50.0, ttft_s=0.9),
    ]
    rows = {row.tier: row for row in by_tier(records)}
    assert (rows["device"].tokens, rows["computed"].tokens) == (90, 110)
    assert rows["device"].prefill_ms_per_token == pytest.approx(0.01)
    assert rows["computed"].prefill_ms_per_token == pytest.approx(0.5)
    assert rows["computed"].ttft_ms is not None
    assert rows["computed"].ttft_ms.p50 == pytest.approx(900)


def test_a_file_holds_all_of_a_run(tmp_path: Path) -> None:
    run = results([record(tiers={"ssd": 3}, gaps_ms=(1.5, 2.5)), record(ending=Ending.CUT)])
    run.save(tmp_path / "run.json")
    assert Results.load(tmp_path / "run.json") == run


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 99}', '{"format": 1, "records": 3, "slo": {}}'])
def test_another_file_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        Results.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("outcome", "left", "wanted"),
    [
        (Outcome(0.0, finish_reason="stop", status=200), False, Ending.OK),
        (Outcome(0.0, status=200), True, Ending.LEFT),
        (Outcome(0.0, status=429, error="429: b''"), False, Ending.REFUSED),
        (Outcome(0.0, status=400, error="400: b''"), False, Ending.REJECTED),
        (Outcome(0.0, status=500, error="500: b''"), False, Ending.FAILED),
        (Outcome(0.0, status=200), False, Ending.CUT),
    ],
)
def test_endings(outcome: Outcome, left: bool, wanted: Ending) -> None:
    assert ending_of(outcome, left=left) is wanted


def test_what_an_answer_tells() -> None:
    outcome = Outcome(
        1.0,
        text_at=[1.5, 1.6, 1.8],
        ended_at=2.0,
        usage={"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
        receipt={
            "tokens": {"device": 4, "computed": 5, "prompt": 9},
            "ms": {"prefill": 7.5},
            "effort": {"asked": 90, "granted": 40},
        },
    )
    told = facts_of(outcome)
    assert (told["cached_tokens"], told["tiers"]) == (4, {"device": 4, "computed": 5})
    assert told["gaps_ms"] == (100.0, 200.0)
    assert (told["prefill_ms"], told["effort_asked"], told["effort_granted"]) == (7.5, 90, 40)


def test_a_record_of_the_wrong_length_is_one() -> None:
    one: Record = record(wanted_answer=8)
    assert not one.wrong_length
    assert replace(one, wanted_prompt=1).wrong_length
