"""Studies: the same budget of search for every policy on training seeds, results on held-out ones."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from epdserve.loadtest.simulator.baselines import BASELINES, CAPS_S, Parameters
from epdserve.loadtest.simulator.capacity import capacity
from epdserve.loadtest.simulator.cluster import ClusterSpec
from epdserve.loadtest.simulator.figures import Figures, figures_of
from epdserve.loadtest.simulator.ours import Ours, Parts, variants
from epdserve.loadtest.simulator.run import Policy, Simulation
from epdserve.loadtest.simulator.workloads import SHAPES, Mix, Shape, Workload, generate, load_trace

# What is searched on; the other shapes are seen by nobody before the results
TRAINING_SHAPES: Final = ("conversation", "code")
# Virtual seconds a run takes; the busier the shape the shorter
SECONDS: Final = {"conversation": 24.0, "agent": 20.0, "code": 8.0, "chat": 14.0}
TRAINING_SEEDS: Final = (1001,)

Maker = Callable[[Parameters | None, int], Policy]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated.

    Attributes:
        load: Offered over capacity.
        traces: Folder of the public traces; None = generated workloads.
    """

    load: float = 1.3
    spec: ClusterSpec = field(default_factory=ClusterSpec)
    mix: Mix = field(default_factory=Mix)
    traces: Path | None = None
    length: float = 1.0

    def workload(self, shape: Shape, seed: int) -> Workload:
        """A workload of a shape at this load."""
        key = (shape.name, seed, self)
        if key not in _WORKLOADS:
            if len(_WORKLOADS) >= _KEPT:
                _WORKLOADS.clear()
            _WORKLOADS[key] = self._make(shape, seed, self.load * self.capacity(shape))
        return _WORKLOADS[key]

    def capacity(self, shape: Shape) -> float:
        """Requests a second that the cluster can serve of a shape."""
        key = (shape.name, self.spec, self.mix, self.traces)
        if key not in _CAPACITIES:
            _CAPACITIES[key] = capacity(self.spec, self._make(shape, 1, 40.0, 2.0))
        return _CAPACITIES[key]

    def _make(self, shape: Shape, seed: int, rate: float, longer: float = 1.0) -> Workload:
        seconds = SECONDS[shape.name] * self.length * longer
        if self.traces is None:
            return generate(shape, seconds=seconds, rate=rate, seed=seed, mix=self.mix)
        found = sorted(self.traces.glob(f"{shape.trace}.*"))
        if not found:
            raise FileNotFoundError(f"no {shape.trace} in {self.traces}")
        return load_trace(found[0], shape, seconds=seconds, rate=rate, seed=seed, mix=self.mix)


_CAPACITIES: dict[tuple[object, ...], float] = {}
_WORKLOADS: dict[tuple[object, ...], Workload] = {}
_KEPT: Final = 8


def makers() -> dict[str, tuple[Maker, Mapping[str, tuple[float, ...]]]]:
    """Every policy: how it is made, and what its search may try."""
    found: dict[str, tuple[Maker, Mapping[str, tuple[float, ...]]]] = {}
    for kind in BASELINES:
        found[kind.name] = (
            lambda parameters, seed, kind=kind: kind(parameters, seed=seed),  # type: ignore[misc]
            {**kind.choices, "cap_s": CAPS_S},
        )
    found[Ours.name] = (lambda parameters, seed: Ours(parameters, seed=seed), Ours.choices)
    return found


def simulate(scenario: Scenario, policy: Policy, shape: Shape, seed: int) -> Figures:
    """One run."""
    return figures_of(Simulation(scenario.spec, policy, scenario.workload(shape, seed)).run())


def search(
    scenario: Scenario, name: str, *, tries: int, seeds: Sequence[int] = TRAINING_SEEDS
) -> tuple[dict[str, float], float]:
    """The best of ``tries`` settings drawn at random, the defaults among them, by mean goodput over capacity."""
    make, choices = makers()[name]
    rng = random.Random(f"search {name}")
    best: tuple[float, dict[str, float]] = (-1.0, {})
    # The bound is what matters most to those that refuse by nothing else: it is drawn evenly
    caps = list(CAPS_S)
    for attempt in range(tries):
        parameters = {key: rng.choice(values) for key, values in sorted(choices.items())} if attempt else {}
        if "cap_s" in choices:
            parameters["cap_s"] = caps[attempt % len(caps)]
        score = statistics.fmean(
            simulate(scenario, make(parameters, seed), shape, seed).goodput / scenario.capacity(shape)
            for shape in (SHAPES[name] for name in TRAINING_SHAPES)
            for seed in seeds
        )
        best = max(best, (score, parameters), key=lambda one: one[0])
    return best[1], best[0]


def compare(
    scenario: Scenario, tuned: Mapping[str, Parameters], *, seeds: Sequence[int]
) -> Iterator[tuple[str, str, int, Figures]]:
    """Every policy on every shape and seed: (policy, shape, seed, figures)."""
    for seed in seeds:
        for shape in SHAPES.values():
            for name, (make, _) in makers().items():
                if name in tuned:
                    yield name, shape.name, seed, simulate(scenario, make(tuned[name], seed), shape, seed)


def ablate(
    scenario: Scenario, parameters: Parameters, *, seeds: Sequence[int]
) -> Iterator[tuple[str, str, int, Figures]]:
    """Ours with one part off each."""
    parts: Parts
    for seed in seeds:
        for shape in SHAPES.values():
            for name, parts in variants().items():
                policy = Ours(parameters, seed=seed, parts=parts)
                yield name, shape.name, seed, simulate(scenario, policy, shape, seed)
