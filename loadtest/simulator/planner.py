"""How many prefill and decode workers a workload needs at its targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epdserve.loadtest.simulator.figures import met
from epdserve.loadtest.simulator.run import Run, Simulation
from epdserve.loadtest.simulator.scenario import PlanTable, ScenarioError, ScenarioFile
from epdserve.loadtest.simulator.workloads import trace_rate


@dataclass(frozen=True, slots=True)
class Trial:
    """A cluster that was tried; the share is the mean over seeds of all requests that met both targets."""

    prefills: int
    decodes: int
    served_ratio: float
    enough: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is needed, and what was tried to find it; ``best`` is None if nothing in bounds is enough."""

    rate: float
    best: Trial | None
    trials: Sequence[Trial]


class Planner:
    """Looks for the fewest workers.

    Args:
        told: Called with each trial as it ends.

    Raises:
        ScenarioError: The scenario has no ``[plan]``.
    """

    def __init__(self, scenario: ScenarioFile, told: Callable[[Trial], None] = lambda trial: None) -> None:
        if scenario.plan is None:
            raise ScenarioError(f"{scenario.name} has no [plan]")
        self._scenario, self._told = scenario, told
        self._wanted: PlanTable = scenario.plan
        trace = scenario.trace
        self.rate = self._wanted.rate or (trace_rate(trace) if trace else scenario.capacity())
        self._known: dict[tuple[int, int], Trial] = {}

    def plan(self) -> Plan:
        """The smallest cluster that was found.

        Decode workers are plenty while the fewest prefill workers are sought, then as few as these allow; then one more
        prefill worker is tried at a time, for as long as each saves more than one decode worker.
        """
        most_p, most_d = self._wanted.max_prefills, self._wanted.max_decodes
        prefills = _fewest(most_p, lambda count: self._try(count, most_d).enough)
        best: Trial | None = None
        while prefills is not None and prefills <= most_p:
            bound = most_d if best is None else best.decodes - 2
            here = prefills
            decodes = _fewest(bound, lambda count, here=here: self._try(here, count).enough)  # type: ignore[misc]
            if decodes is None:
                break
            best, prefills = self._known[prefills, decodes], prefills + 1
        return Plan(self.rate, best, tuple(self._known.values()))

    def _try(self, prefills: int, decodes: int) -> Trial:
        known = self._known.get((prefills, decodes))
        if known is None:
            spec = self._scenario.spec(prefills=prefills, decodes=decodes)
            share = statistics.fmean(
                _served(
                    Simulation(
                        spec, self._scenario.make_policy(seed), self._scenario.workload(self.rate, seed)
                    ).run()
                )
                for seed in self._scenario.seeds
            )
            known = Trial(prefills, decodes, share, share >= self._wanted.served_ratio)
            self._known[prefills, decodes] = known
            self._told(known)
        return known


def _served(run: Run) -> float:
    return sum(job is not None and met(job) for job in run.jobs) / len(run.jobs)


def _fewest(most: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest count that is enough, None if ``most`` is not: doubling first, halving then."""
    low, count = 1, 1
    while count <= most and not enough(count):
        if count == most:
            return None
        low, count = count + 1, min(2 * count, most)
    if count > most:
        return None
    while low < count:
        middle = (low + count) // 2
        if enough(middle):
            count = middle
        else:
            low = middle + 1
    return count
