"""One HTML page of one scenario, or of two beside each other; it loads nothing from anywhere."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from epdserve.loadtest import pages
from epdserve.loadtest.simulator.caches import TIERS
from epdserve.loadtest.simulator.figures import Figures
from epdserve.loadtest.simulator.planner import Plan
from epdserve.loadtest.simulator.sweep import LEVELS, Point
from epdserve.loadtest.simulator.tables import half_width, spread
from epdserve.loadtest.svg import Line, bars, lines


@dataclass(frozen=True, slots=True)
class Told:
    """A scenario's name, its runs, its plan if it asked for one, and where it came from, as text."""

    name: str
    points: Sequence[Point]
    plan: Plan | None = None
    source: str = ""

    def at(self, load: float) -> list[Point]:
        """Runs of one load."""
        return [point for point in self.points if point.load == load]

    @property
    def loads(self) -> list[float]:
        """In order."""
        return sorted({point.load for point in self.points})


# Column: heading, what of figures, how it is written
_COLUMNS: Final[tuple[tuple[str, Callable[[Figures], float], str], ...]] = (
    ("goodput/s", lambda one: one.goodput, "{:.1f}"),
    ("in time, of admitted", lambda one: one.met_ratio, "{:.3f}"),
    ("refused", lambda one: one.refused_ratio, "{:.3f}"),
    ("TTFT p50 s", lambda one: one.ttft_p50_s, "{:.3f}"),
    ("TTFT p99 s", lambda one: one.ttft_p99_s, "{:.3f}"),
    ("TPOT p50 s", lambda one: one.tpot_p50_s, "{:.4f}"),
    ("TPOT p99 s", lambda one: one.tpot_p99_s, "{:.4f}"),
    ("hits", lambda one: sum(one.hit_ratio.values()), "{:.3f}"),
    ("Jain", lambda one: one.fairness, "{:.3f}"),
    ("effort", lambda one: one.granted_effort, "{:.1f}"),
)


def table(told: Told) -> list[list[str]]:
    """Rows of text, headings first: a load each, means with 95 % intervals over seeds."""
    rows = [["load", "requests/s", *(name for name, _, _ in _COLUMNS)]]
    for load in told.loads:
        points = told.at(load)
        cells = [spread([read(point.figures) for point in points], form) for _, read, form in _COLUMNS]
        rows.append([f"{load:g}", f"{points[0].rate:.1f}", *cells])
    return rows


def comparison(one: Told, other: Told) -> list[list[str]]:
    """Rows of text: differences, other less one, seed by seed, for the loads that both have."""
    rows = [["load", "seeds", *(name for name, _, _ in _COLUMNS)]]
    for load in one.loads:
        pairs = _pairs(one, other, load)
        if not pairs:
            continue
        cells = [
            spread([read(theirs) - read(mine) for mine, theirs in pairs], form) for _, read, form in _COLUMNS
        ]
        rows.append([f"{load:g}", str(len(pairs)), *cells])
    return rows


def page(told: Sequence[Told]) -> str:
    """The page."""
    title = " and ".join(one.name for one in told)
    parts = [pages.heading(title, 1)]
    for one in told:
        parts += [pages.heading(one.name), pages.table(table(one))]
        if one.plan is not None:
            parts.append(_plan(one.plan))
    if len(told) == 2:
        names = f"{told[1].name} less {told[0].name}, same seeds"
        parts += [pages.heading(names), pages.table(comparison(*told))]
    parts += _plots(told)
    parts += [pages.details(f"{one.name}: its file", one.source) for one in told]
    return pages.page(title, parts)


def _plots(told: Sequence[Told]) -> list[str]:
    plots = [lines("Goodput over load", "load", "requests in time a second", [_goodput(one) for one in told])]
    for name, read, unit in (("TTFT", "ttft_s", "s"), ("TPOT", "tpot_s", "s")):
        drawn = [
            Line(f"{one.name}, load {load:g}", _middle(one.at(load), read), LEVELS)
            for one in told
            for load in _ends(one.loads)
            if any(getattr(point, read) for point in one.at(load))
        ]
        plots.append(lines(f"{name}, admitted requests", f"{name}, {unit}", "share below", drawn, log_x=True))
    last = {one.name: one.at(one.loads[-1]) for one in told}
    found = {name: [point.figures.hit_ratio for point in points] for name, points in last.items()}
    in_time = {name: [point.tenants for point in points] for name, points in last.items()}
    granted = {
        name: [{_effort(effort): count for effort, count in point.efforts.items()} for point in points]
        for name, points in last.items()
    }
    efforts = sorted({effort for points in last.values() for point in points for effort in point.efforts})
    tenants = sorted({name for runs in in_time.values() for run in runs for name in run})
    return [
        *plots,
        bars("Prompt tokens found, by tier, highest load", "share of prompt tokens", _means(found, TIERS)),
        bars("Requests in time by tenant, highest load", "requests", _means(in_time, tenants)),
        bars(
            "Effort granted, highest load",
            "requests",
            _means(granted, [_effort(effort) for effort in efforts]),
        ),
    ]


def _means(
    runs: Mapping[str, Sequence[Mapping[str, float]]], keys: Sequence[str]
) -> dict[str, dict[str, float]]:
    """By key, and by the scenario's name: the mean over its runs."""
    return {
        key: {name: statistics.fmean(run.get(key, 0.0) for run in ran) for name, ran in runs.items()}
        for key in keys
    }


def _effort(level: int) -> str:
    return str(level) if level else "refused"


def _goodput(told: Told) -> Line:
    values = [[point.figures.goodput for point in told.at(load)] for load in told.loads]
    means, halves = [statistics.fmean(one) for one in values], [half_width(one) for one in values]
    return Line(
        told.name,
        told.loads,
        means,
        [max(0.0, mean - half) for mean, half in zip(means, halves, strict=True)],
        [mean + half for mean, half in zip(means, halves, strict=True)],
    )


def _middle(points: Sequence[Point], read: str) -> list[float]:
    """The median over seeds at each level."""
    told = [getattr(point, read) for point in points if getattr(point, read)]
    return [statistics.median(column) for column in zip(*told, strict=True)]


def _ends(loads: Sequence[float]) -> list[float]:
    return list(dict.fromkeys((loads[0], loads[-1])))


def _pairs(one: Told, other: Told, load: float) -> list[tuple[Figures, Figures]]:
    theirs = {point.seed: point.figures for point in other.at(load)}
    return [(point.figures, theirs[point.seed]) for point in one.at(load) if point.seed in theirs]


def _plan(plan: Plan) -> str:
    best = plan.best
    words = (
        "no cluster within the bounds is enough"
        if best is None
        else f"{best.prefills} prefill and {best.decodes} decode workers ({best.served_ratio:.1%} in time)"
    )
    rows = [["prefill", "decode", "in time", "enough"]]
    rows += [
        [str(one.prefills), str(one.decodes), f"{one.served_ratio:.3f}", "yes" if one.enough else "no"]
        for one in plan.trials
    ]
    return f"<p>For {plan.rate:.2f} requests/s: {escape(words)}.</p>{pages.table(rows)}"
