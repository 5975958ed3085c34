"""A scenario file: what is simulated, said in TOML."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from epdserve.loadtest.simulator.capacity import capacity
from epdserve.loadtest.simulator.cluster import ClusterSpec, Fault
from epdserve.loadtest.simulator.hardware import GPUS, Timing
from epdserve.loadtest.simulator.requests import INTERACTIVE, STANDARD, Targets
from epdserve.loadtest.simulator.run import Policy
from epdserve.loadtest.simulator.study import SECONDS, makers
from epdserve.loadtest.simulator.workloads import SHAPES, Mix, Workload, generate, load_trace
from pydantic import BaseModel, ConfigDict, Field, ValidationError

_MOST_RUNS = 10_000

Count = Annotated[int, Field(ge=1, le=4096)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1)]


class ScenarioError(Exception):
    """A file that is none; the message says where and why."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClusterTable(_Table):
    """``[cluster]``; tokens are what pages, host caches and decode workers hold."""

    prefills: Count = 5
    decodes: Count = 3
    gpu: str = "H200"
    gpus: Count = 4
    pages_tokens: Annotated[int, Field(ge=512)] = 4_000_000
    host_tokens: Annotated[int, Field(ge=512)] = 20_000_000
    decode_tokens: Annotated[int, Field(ge=512)] = 240_000_000
    heartbeat_s: Annotated[float, Field(ge=0.01, le=60)] = 0.25
    routers: Count = 2


class MixTable(_Table):
    """``[mix]``: who asks; tenant k has the weight 1 / (k + 1) ** skew."""

    tenant_skew: Annotated[float, Field(ge=0, le=10)] = 0.7
    floor_ratio: Ratio = 0.3
    standard_ratio: Ratio = 0.3


class SloTable(_Table):
    """``[slo.interactive]``, ``[slo.standard]``."""

    ttft_s: Positive
    tpot_s: Positive
    room: Annotated[float, Field(gt=0, le=1)] = 1.0


class FaultTable(_Table):
    """``[[faults]]``: a worker is slower for a while, drains, or is dead."""

    role: Literal["prefill", "decode"]
    worker: Annotated[int, Field(ge=0)]
    at_s: Annotated[float, Field(ge=0)]
    until_s: Positive
    slowness: Positive = 1.0
    drains: bool = False
    dies: bool = False


class PlanTable(_Table):
    """``[plan]``: how many workers are needed.

    Attributes:
        rate: Requests a second; of a trace without it, the trace's own.
        served_ratio: Share of all requests that must meet both targets.
    """

    rate: Positive | None = None
    served_ratio: Ratio = 0.95
    max_prefills: Count = 64
    max_decodes: Count = 64


class ScenarioFile(_Table):
    """The whole file.

    Attributes:
        shape: Of generated traffic; with ``trace``, what stands in for what traces do not say.
        trace: One of the public traces; relative to the scenario's folder.
        loads: Offered over capacity, one run each and a seed.
        length: Of a run, over the usual.
        settings: Of the policy, by name.
    """

    name: Annotated[str, Field(min_length=1, max_length=120)] = "scenario"
    shape: str = "conversation"
    trace: Path | None = None
    policy: str = "epdserve"
    settings: dict[str, float] = {}
    loads: Annotated[list[Positive], Field(min_length=1, max_length=64)] = [0.7, 1.0, 1.3, 1.6]
    seeds: Annotated[list[int], Field(min_length=1, max_length=100)] = [1, 2, 3]
    length: Annotated[float, Field(gt=0, le=100)] = 1.0
    cluster: ClusterTable = ClusterTable()
    mix: MixTable = MixTable()
    slo: dict[Literal["interactive", "standard"], SloTable] = {}
    faults: list[FaultTable] = []
    plan: PlanTable | None = None

    def spec(self, *, prefills: int = 0, decodes: int = 0) -> ClusterSpec:
        """The cluster, or one with so many workers."""
        table = self.cluster
        return ClusterSpec(
            prefills or table.prefills,
            decodes or table.decodes,
            Timing(GPUS[table.gpu], table.gpus),
            table.pages_tokens,
            table.host_tokens,
            table.decode_tokens,
            table.heartbeat_s,
            table.routers,
            tuple(Fault(**fault.model_dump()) for fault in self.faults),
        )

    def make_policy(self, seed: int) -> Policy:
        """The policy, new."""
        make, _ = makers()[self.policy]
        return make(self.settings, seed)

    def capacity(self) -> float:
        """Requests a second that the cluster can serve."""
        return capacity(self.spec(), self.workload(40.0, 1, longer=2.0))

    def workload(self, rate: float, seed: int, *, longer: float = 1.0) -> Workload:
        """Requests at a rate, with this file's targets."""
        shape, mix = SHAPES[self.shape], Mix(**self.mix.model_dump())
        seconds = SECONDS[shape.name] * self.length * longer
        if self.trace is None:
            made = generate(shape, seconds=seconds, rate=rate, seed=seed, mix=mix)
        else:
            made = load_trace(self.trace, shape, seconds=seconds, rate=rate, seed=seed, mix=mix)
        if not made.requests:
            raise ScenarioError(f"{self.name}: {seconds:g} s at {rate:g}/s hold no request")
        targets = {one.name: self._targets(one) for one in (INTERACTIVE, STANDARD)}
        return replace(
            made, requests=[replace(one, targets=targets[one.targets.name]) for one in made.requests]
        )

    def _targets(self, usual: Targets) -> Targets:
        said = self.slo.get(usual.name)  # type: ignore[call-overload]
        return usual if said is None else Targets(usual.name, said.ttft_s, said.tpot_s, said.room)


def read_scenario(path: Path) -> ScenarioFile:
    """A scenario from its file.

    Raises:
        ScenarioError: It cannot be read, is no TOML, or says something that is not possible.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ScenarioError(f"{path} is no TOML file: {error}") from error
    table.setdefault("name", path.stem)
    try:
        scenario = ScenarioFile.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ScenarioError(f"{path}: {place}: {first['msg']}") from error
    if scenario.trace is not None:
        scenario = scenario.model_copy(update={"trace": path.parent / scenario.trace})
    _check(scenario, path)
    return scenario


def _check(scenario: ScenarioFile, path: Path) -> None:
    """What no single field can say.

    Raises:
        ScenarioError: As it says.
    """
    policies = makers()
    problems: list[tuple[bool, Any]] = [
        (scenario.shape not in SHAPES, f"shape must be one of {', '.join(SHAPES)}"),
        (scenario.policy not in policies, f"policy must be one of {', '.join(policies)}"),
        (scenario.cluster.gpu not in GPUS, f"cluster.gpu must be one of {', '.join(GPUS)}"),
        (len(scenario.loads) * len(scenario.seeds) > _MOST_RUNS, f"more than {_MOST_RUNS} runs"),
        (scenario.trace is not None and not scenario.trace.is_file(), f"no trace at {scenario.trace}"),
        (any(fault.until_s <= fault.at_s for fault in scenario.faults), "a fault ends before it begins"),
    ]
    counts = {"prefill": scenario.cluster.prefills, "decode": scenario.cluster.decodes}
    problems.append(
        (any(fault.worker >= counts[fault.role] for fault in scenario.faults), "a fault names no worker")
    )
    for wrong, message in problems:
        if wrong:
            raise ScenarioError(f"{path}: {message}")
