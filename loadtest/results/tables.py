"""Rows of text about a run, headings first: for terminals and pages alike."""

from __future__ import annotations

from collections.abc import Sequence

from epdserve.loadtest.figures import Spread
from epdserve.loadtest.results.analysis import Prices, Summary, by_tier, summarise
from epdserve.loadtest.results.record import Record, Results

_HEAD = (
    "kind",
    "requests",
    "whole",
    "left",
    "refused",
    "not as expected",
    "goodput/s",
    "in time",
    "TTFT ms p50 / p90 / p99",
    "TPOT ms p50 / p90 / p99",
    "ITL ms p50 / p99",
    "answer tokens/s",
    "prompt tokens",
    "cached",
)


def kinds(results: Results) -> list[list[str]]:
    """A row for each kind of customer, and one for all."""
    rows = [list(_HEAD)]
    names = list(dict.fromkeys(record.kind for record in results.records))
    groups = [(name, [r for r in results.records if r.kind == name]) for name in names]
    if len(groups) > 1:
        groups.append(("all", list(results.records)))
    return rows + [_row(name, summarise(records, results.elapsed_s, results.slo)) for name, records in groups]


def _row(name: str, one: Summary) -> list[str]:
    endings = one.endings
    return [
        name,
        str(one.requests),
        str(endings.get("ok", 0)),
        str(endings.get("left", 0)),
        str(endings.get("refused", 0)),
        str(one.unexpected),
        f"{one.goodput_per_s:.2f}",
        f"{one.in_time_ratio:.1%}",
        three(one.ttft_ms),
        three(one.tpot_ms),
        "-" if one.itl_ms is None else f"{one.itl_ms.p50:.1f} / {one.itl_ms.p99:.1f}",
        f"{one.answer_tokens_per_s:.1f}",
        str(one.prompt_tokens),
        f"{one.cached_ratio:.1%}",
    ]


def three(spread: Spread | None) -> str:
    """Percentiles, shortly."""
    return "-" if spread is None else f"{spread.p50:.1f} / {spread.p90:.1f} / {spread.p99:.1f}"


def tiers(records: Sequence[Record]) -> list[list[str]]:
    """Where prompt tokens came from, and what that cost; headings alone where the server does not tell."""
    rows = [["tier", "prompt tokens", "share", "requests mostly from it", "TTFT ms", "prefill us a token"]]
    found = by_tier(records)
    total = sum(row.tokens for row in found) or 1
    return rows + [
        [
            row.tier,
            str(row.tokens),
            f"{row.tokens / total:.1%}",
            str(row.requests),
            three(row.ttft_ms),
            "-" if row.prefill_ms_per_token is None else f"{1e3 * row.prefill_ms_per_token:.0f}",
        ]
        for row in found
    ]


def told(results: Results, prices: Prices | None = None) -> list[tuple[str, str]]:
    """A run in a few lines: name and value."""
    one = summarise(results.records, results.elapsed_s, results.slo, prices)
    rows = [
        ("requests", f"{one.requests} in {results.elapsed_s:.1f} s, {one.requests_per_s:.2f} a second"),
        ("endings", ", ".join(f"{name} {count}" for name, count in sorted(one.endings.items()))),
        (
            "goodput",
            f"{one.goodput_per_s:.2f} a second, {one.in_time_ratio:.1%} in time (TTFT <= "
            f"{results.slo.ttft_s:g} s, TPOT <= {1e3 * results.slo.tpot_s:g} ms)",
        ),
        ("tokens", f"{one.prompt_tokens} of prompts, {one.cached_ratio:.1%} cached"),
        ("answers", f"{one.answer_tokens_per_s:.1f} tokens a second"),
        ("TTFT ms", three(one.ttft_ms)),
        ("TPOT ms", three(one.tpot_ms)),
        ("ITL ms", three(one.itl_ms)),
        ("sent late, ms", three(one.late_ms)),
    ]
    if one.cost:
        rows.append(("cost", f"{one.cost:.6f}"))
    if one.wrong_lengths:
        rows.append(("WRONG LENGTHS", str(one.wrong_lengths)))
    if one.unexpected:
        errors = list(dict.fromkeys(r.error or r.ending.value for r in results.records if not r.expected))
        rows.append(("NOT AS EXPECTED", f"{one.unexpected}: " + "; ".join(errors[:3])))
    return rows
