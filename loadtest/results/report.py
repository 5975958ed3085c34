"""One HTML page of a run: what was asked for, figures, plots over time, goodput, hits and cost by tier."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from typing import Final

from epdserve.loadtest import pages
from epdserve.loadtest.results import tables
from epdserve.loadtest.results.analysis import (
    Prices,
    Series,
    by_tier,
    over_time,
    rates_over_time,
    summarise,
)
from epdserve.loadtest.results.record import Record, Results, Slo
from epdserve.loadtest.svg import Line, bars, lines

_STEPS: Final = 12


def page(results: Results, prices: Prices | None = None) -> str:
    """The page."""
    facts = [["what", "value"], *([name, value] for name, value in tables.told(results, prices))]
    parts = [
        pages.heading(f"Load test: {results.name}", 1),
        f"<p>{escape(results.started_at)}. Percentiles are p50 / p90 / p99, of whole answers.</p>",
        pages.table(facts),
        pages.heading("By kind of customer"),
        pages.table(tables.kinds(results)),
        pages.heading("Over time"),
        *_times(results),
        pages.heading("Goodput"),
        *_goodput(results),
    ]
    if by_tier(results.records):
        parts += [
            pages.heading("Hits and their cost, by tier"),
            pages.table(tables.tiers(results.records)),
            *_tiers(results),
        ]
    if any(record.effort_granted for record in results.records):
        parts += [pages.heading("Effort"), _efforts(results)]
    parts.append(pages.details("Settings of the run", json.dumps(dict(results.settings), indent=1)))
    return pages.page(f"Load test: {results.name}", parts)


def _times(results: Results) -> list[str]:
    told = (
        ("TTFT", over_time(results, lambda r: [None if r.ttft_s is None else 1e3 * r.ttft_s])),
        ("TPOT", over_time(results, lambda r: [None if r.tpot_s is None else 1e3 * r.tpot_s])),
        ("ITL", over_time(results, lambda r: r.gaps_ms)),
    )
    plots = [lines(f"{name} over time", "s since the start", f"{name}, ms", _three(s)) for name, s in told]
    at, rates = rates_over_time(results)
    drawn = [Line(name, at, values) for name, values in rates.items() if any(values)]
    return [*plots, lines("Requests a second", "s since the start", "requests/s", drawn)]


def _three(series: Series) -> list[Line]:
    return [
        Line("p50", series.at_s, series.p50),
        Line("p90", series.at_s, series.p90),
        Line("p99", series.at_s, series.p99),
    ]


def _goodput(results: Results) -> list[str]:
    """What goodput would be at other targets: how far the declared ones are from a cliff."""
    slo, records = results.slo, results.records

    def at(ttft_s: float, tpot_s: float) -> float:
        return summarise(records, results.elapsed_s, Slo(ttft_s, tpot_s)).goodput_per_s

    scales = [2 * (step + 1) / _STEPS for step in range(_STEPS)]
    first = Line(
        "TPOT as declared", [s * slo.ttft_s for s in scales], [at(s * slo.ttft_s, slo.tpot_s) for s in scales]
    )
    other = [1e3 * s * slo.tpot_s for s in scales]
    second = Line("TTFT as declared", other, [at(slo.ttft_s, s * slo.tpot_s) for s in scales])
    return [
        lines(f"Goodput by target of TTFT (declared: {slo.ttft_s:g} s)", "s", "requests in time/s", [first]),
        lines(
            f"Goodput by target of TPOT (declared: {1e3 * slo.tpot_s:g} ms)",
            "ms",
            "requests in time/s",
            [second],
        ),
    ]


def _tiers(results: Results) -> list[str]:
    found = by_tier(results.records)
    tokens = {row.tier: {"prompt tokens": float(row.tokens)} for row in found}
    waits = {row.tier: {"p50": row.ttft_ms.p50, "p99": row.ttft_ms.p99} for row in found if row.ttft_ms}
    return [
        bars("Prompt tokens by tier", "tokens", tokens),
        bars("TTFT of requests mostly from a tier", "ms", waits),
    ]


def _efforts(results: Results) -> str:
    asked = Counter(_level(record, asked=True) for record in results.records if record.effort_granted)
    granted = Counter(_level(record, asked=False) for record in results.records if record.effort_granted)
    levels = sorted({*asked, *granted})
    groups = {
        f"{level}-{level + 9}": {"asked": float(asked[level]), "granted": float(granted[level])}
        for level in levels
    }
    return bars("Effort asked and granted", "requests", groups)


def _level(record: Record, *, asked: bool) -> int:
    level = (record.effort_asked if asked else record.effort_granted) or 0
    return level // 10 * 10
