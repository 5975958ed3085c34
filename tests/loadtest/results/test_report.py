"""The page and the comparison: they say what was measured, and load nothing."""

import random
from html.parser import HTMLParser

import pytest
from epdserve.loadtest.results.analysis import Prices
from epdserve.loadtest.results.compare import compare, rows
from epdserve.loadtest.results.record import Ending, Record
from epdserve.loadtest.results.report import page
from support.loads import record, results


class Markup(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.captions: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect", "line", "polyline", "polygon"):
            self.open.append(tag)
        self.loads += [str(value) for name, value in attributes if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "figcaption":
            self.captions.append(data)


def many(seed: int, *, slower: float = 0.0, count: int = 200) -> list[Record]:
    draw = random.Random(seed)
    return [
        record(
            at_s=0.05 * n, ttft_s=draw.lognormvariate(-2, 0.4) + slower, tiers={"device": 60, "computed": 40}
        )
        for n in range(count)
    ]


def test_a_page_has_every_plot_and_loads_nothing() -> None:
    found = Markup()
    run = results(
        [*many(1), record(kind="<b>&", effort_asked=90, effort_granted=40), record(ending=Ending.CUT)],
        name="<script>alert(1)</script>",
    )
    told = page(run, Prices(1, 2, 3))
    found.feed(told)
    assert found.open == []
    assert found.loads == []
    assert "<script" not in told
    assert "<b>&" not in told
    for wanted in ("TTFT over time", "TPOT over time", "ITL over time", "Requests a second"):
        assert wanted in found.captions
    assert any("Goodput by target of TTFT" in caption for caption in found.captions)
    assert "Prompt tokens by tier" in found.captions
    assert "Effort asked and granted" in found.captions


def test_a_run_without_a_whole_answer_still_has_a_page() -> None:
    assert "Load test" in page(
        results([record(ending=Ending.FAILED, ttft_s=None, tpot_s=None, expected=False)])
    )


def test_the_same_load_is_the_same_and_a_slower_one_is_worse() -> None:
    one, again, slow = (
        results(many(seed, slower=s), name=str(seed)) for seed, s in ((1, 0), (2, 0), (3, 0.2))
    )
    same = {each.name: each for each in compare(one, again)}
    assert all(each.verdict == "same" for each in same.values())
    worse = {each.name: each for each in compare(one, slow)}
    assert worse["TTFT p50, ms"].verdict == "worse"
    assert 150 < worse["TTFT p50, ms"].low < worse["TTFT p50, ms"].high < 250
    better = {each.name: each for each in compare(slow, one)}
    assert better["TTFT p50, ms"].verdict == "better"


def test_more_answers_in_time_are_better() -> None:
    one, other = results(many(1)), results([record(ttft_s=5.0) for _ in range(100)])
    found = {each.name: each for each in compare(one, other)}
    assert found["in time, share"].verdict == "worse"
    assert len(rows(one, other, list(found.values()))) == 1 + len(found)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    pairs = [(results(many(2 * n, count=60)), results(many(2 * n + 1, count=60))) for n in range(60)]
    differs = sum(compare(*pair)[0].verdict != "same" for pair in pairs)
    assert differs <= 9  # 5 % of 60, and some luck


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="no interval"):
        compare(results(many(1)), results([record()]))
