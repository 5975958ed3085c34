"""``epdserve simulate``: a scenario file in, a table and one HTML page out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from epdserve.loadtest.simulator.planner import Plan, Planner, Trial
from epdserve.loadtest.simulator.report import Told, comparison, page, table
from epdserve.loadtest.simulator.scenario import ScenarioError, read_scenario
from epdserve.loadtest.simulator.sweep import sweep
from epdserve.services.cli.errors import CommandError


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What the command line says; ``out`` None = no page."""

    scenario: Path
    compare: Path | None = None
    out: Path | None = None


def run(options: SimulateOptions) -> None:
    """Simulate, print, write.

    Raises:
        CommandError: A file does not fit, or the page cannot be written.
    """
    try:
        told = [_simulate(path) for path in (options.scenario, options.compare) if path is not None]
    except (ScenarioError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    for one in told:
        print(f"\n{one.name}\n")
        _print(table(one))
        if one.plan is not None:
            _print_plan(one.plan)
    if len(told) == 2:
        print(f"\n{told[1].name} less {told[0].name}, same seeds, 95 % intervals\n")
        _print(comparison(*told))
    if options.out is not None:
        try:
            options.out.write_text(page(told), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"cannot write {options.out}: {error.strerror}") from error
        print(f"\n{options.out}")


def _simulate(path: Path) -> Told:
    scenario = read_scenario(path)
    points = sweep(scenario, _progress)
    plan: Plan | None = None
    if scenario.plan is not None:
        plan = Planner(scenario, _tried).plan()
    _say("", end="\n")
    return Told(scenario.name, points, plan, path.read_text(encoding="utf-8"))


def _progress(done: int, total: int, what: str) -> None:
    _say(f"{done}/{total} {what}")


def _tried(trial: Trial) -> None:
    enough = "enough" if trial.enough else "not enough"
    _say(f"{trial.prefills} + {trial.decodes} workers: {trial.served_ratio:.3f}, {enough}")


def _say(text: str, *, end: str = "") -> None:
    """One line that replaces the last one on a terminal; lines of their own elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def _print(rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _print_plan(plan: Plan) -> None:
    best = plan.best
    if best is None:
        print(f"\nfor {plan.rate:.2f} requests/s: no cluster within the bounds is enough")
        return
    print(
        f"\nfor {plan.rate:.2f} requests/s: {best.prefills} prefill and {best.decodes} decode workers "
        f"({best.served_ratio:.1%} in time; {len(plan.trials)} clusters tried)"
    )
