"""From figures to tables in Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from epdserve.loadtest.simulator.figures import Figures
from epdserve.loadtest.simulator.study import Scenario
from epdserve.loadtest.simulator.workloads import SHAPES

# Two-sided 95 % of Student's t by degrees of freedom; beyond the list, the normal's
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)

Row = tuple[str, str, int, Figures]


def spread(values: Sequence[float], form: str = "{:.1f}") -> str:
    """Mean, and half the width of its 95 % confidence interval."""
    mean = form.format(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} +- {form.format(half_width(values))}"


def half_width(values: Sequence[float]) -> float:
    """Half the width of the mean's 95 % confidence interval (Student's t); 0 for a single value."""
    if len(values) < 2:
        return 0.0
    t = _T95[len(values) - 2] if len(values) <= len(_T95) + 1 else 1.96
    return t * statistics.stdev(values) / math.sqrt(len(values))


def goodput_table(scenario: Scenario, rows: Iterable[Row], *, base: str) -> str:
    """Goodput by policy and shape, and the mean of its ratio to that of ``base``, seed by seed."""
    taken: dict[str, dict[str, dict[int, Figures]]] = {}
    for name, shape, seed, figures in rows:
        taken.setdefault(name, {}).setdefault(shape, {})[seed] = figures
    lines = [
        f"| policy | {' | '.join(SHAPES)} | mean over `{base}` | met of admitted | refused | hits | effort |",
        f"|---|{'---|' * (len(SHAPES) + 5)}",
    ]
    for name, shapes in taken.items():
        cells = [spread([one.goodput for one in seeds.values()]) for seeds in shapes.values()]
        ratios = (
            [
                one.goodput / taken[base][shape][seed].goodput
                for shape, seeds in shapes.items()
                for seed, one in seeds.items()
                if base in taken and taken[base][shape][seed].goodput
            ]
            if base in taken
            else []
        )
        every = [one for seeds in shapes.values() for one in seeds.values()]
        ratio = f"{statistics.fmean(ratios):.3f}" if ratios else "-"
        met, refused, effort = (
            statistics.fmean(getattr(one, field) for one in every)
            for field in ("met_ratio", "refused_ratio", "granted_effort")
        )
        hits = statistics.fmean(sum(one.hit_ratio.values()) for one in every)
        lines.append(
            f"| {name} | {' | '.join(cells)} | {ratio} | {met:.2f} | {refused:.2f} | {hits:.2f} | {effort:.0f} |"
        )
    capacities = ", ".join(f"{name} {scenario.capacity(shape):.1f}" for name, shape in SHAPES.items())
    return "\n".join([*lines, "", f"Capacity, requests/s: {capacities}; load {scenario.load:g}."])
