"""Runs of a scenario: every load and seed, with what a report needs of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from epdserve.loadtest.simulator.figures import Figures, figures_of, met, tpot_s, ttft_s
from epdserve.loadtest.simulator.run import Run, Simulation
from epdserve.loadtest.simulator.scenario import ScenarioFile

# Shares at which distributions are told
LEVELS: Final = (*(step / 50 for step in range(50)), 0.99, 1.0)

Progress = Callable[[int, int, str], None]
"""Runs done, runs in all, what the last one was."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run.

    Attributes:
        load: Offered over capacity; ``rate`` the same in requests a second.
        ttft_s, tpot_s: Of admitted requests at ``LEVELS``; empty if none was.
        efforts: Requests by effort granted; 0 = refused.
        tenants: Requests in time, by tenant.
    """

    load: float
    rate: float
    seed: int
    figures: Figures
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    efforts: dict[int, int]
    tenants: dict[str, int]


def sweep(scenario: ScenarioFile, progress: Progress = lambda done, of, what: None) -> list[Point]:
    """All runs, load by load."""
    capacity = scenario.capacity()
    points: list[Point] = []
    total = len(scenario.loads) * len(scenario.seeds)
    for load in scenario.loads:
        for seed in scenario.seeds:
            points.append(one_run(scenario, load, load * capacity, seed))
            progress(len(points), total, f"{scenario.name}: load {load:g}, seed {seed}")
    return points


def one_run(scenario: ScenarioFile, load: float, rate: float, seed: int) -> Point:
    """One run of the scenario's policy at a rate."""
    policy, workload = scenario.make_policy(seed), scenario.workload(rate, seed)
    return point_of(Simulation(scenario.spec(), policy, workload).run(), load=load, rate=rate, seed=seed)


def point_of(run: Run, *, load: float, rate: float, seed: int) -> Point:
    """What a report needs of a run."""
    inside = [job for job in run.jobs if job is not None]
    ended = [job for job in inside if not job.failed]
    efforts: dict[int, int] = {}
    tenants = {request.tenant: 0 for request in run.requests}
    for job in run.jobs:
        granted = 0 if job is None else job.effort
        efforts[granted] = efforts.get(granted, 0) + 1
    for job in inside:
        tenants[job.request.tenant] += met(job)
    return Point(
        load,
        rate,
        seed,
        figures_of(run),
        _levels([ttft_s(job) for job in ended]),
        _levels([tpot_s(job) for job in ended if job.output_tokens > 1]),
        dict(sorted(efforts.items())),
        dict(sorted(tenants.items())),
    )


def _levels(values: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    if not ordered:
        return ()
    return tuple(ordered[min(len(ordered) - 1, int(level * len(ordered)))] for level in LEVELS)
