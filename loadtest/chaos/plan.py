"""A plan, read from TOML: pools, load, phases, faults, and what they are judged by. Unknown keys are refused."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

ROLES: Final = ("prefill", "decode", "encode", "store")


class PlanError(Exception):
    """A plan that cannot be carried out; one line."""


class What(StrEnum):
    """What happens. Those that last end after ``lasts_s``.

    Attributes:
        KILL: SIGKILL; whoever watches over processes starts another life.
        TERMINATE: SIGTERM: it drains.
        STOP: SIGSTOP, then SIGCONT.
        REDIS: The registry is killed, and back after a while, empty.
        DISK_FULL: One of the store's drives has no byte left.
        SLOW_DISK: The store's process may move few bytes a second to and from its other drive.
        CUT: No packet passes between the worker's network namespace and the others'.
    """

    KILL = "kill"
    TERMINATE = "terminate"
    STOP = "stop"
    REDIS = "redis"
    DISK_FULL = "disk full"
    SLOW_DISK = "slow disk"
    CUT = "cut"


ROOT_ONLY: Final = frozenset({What.DISK_FULL, What.SLOW_DISK, What.CUT})
_LAST: Final = frozenset({What.STOP, What.REDIS, What.DISK_FULL, What.SLOW_DISK, What.CUT})
_TARGETED: Final = frozenset({What.KILL, What.TERMINATE, What.STOP, What.CUT})


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time with one load.

    Attributes:
        load: Requests a second, in multiples of the peak that was measured first.
        in_time_ratio: Least share of requests that must be whole and in time; 0 = not judged.
        goodput_ratio: Least goodput, as a share of the best phase's; 0 = not judged.
        refusals: Whether 429 and 503 are right answers here.
    """

    name: str
    seconds: float
    load: float
    in_time_ratio: float = 0.0
    goodput_ratio: float = 0.0
    refusals: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """One misfortune.

    Attributes:
        at_s: From the start of the first phase.
        target: Worker, for what has one.
        recovery_s: Within so long the targets are met again; 0 = not judged.
    """

    at_s: float
    what: What
    target: str = ""
    lasts_s: float = 0.0
    recovery_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What in time means."""

    ttft_s: float = 4.0
    tpot_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked.

    Attributes:
        conversations: Of two turns each; each has an answer of its own that is always the same.
        peak_clients, peak_s: How the peak is measured: so many ask without a pause for so long.
        rate: Peak in requests a second; 0 = measured.
    """

    conversations: int = 4
    prompt_words: int = 60
    answer_tokens: int = 24
    peak_clients: int = 4
    peak_s: float = 10.0
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole of it.

    Attributes:
        pools: Workers of each role.
        config: Tables of the server's own file.
        apart: Workers that stand in a network namespace of their own.
    """

    name: str
    phases: tuple[Phase, ...]
    faults: tuple[Fault, ...] = ()
    pools: Mapping[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 2, "store": 1})
    config: Mapping[str, Any] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    targets: Targets = field(default_factory=Targets)
    seed: int = 1

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for phase in self.phases)

    def shortened(self, factor: float) -> Plan:
        """The same in ``factor`` of the time: phases, moments and durations of faults; not what recovery may take."""
        return replace(
            self,
            name=f"{self.name}, {factor:g} of its length",
            phases=tuple(replace(phase, seconds=phase.seconds * factor) for phase in self.phases),
            faults=tuple(
                replace(fault, at_s=fault.at_s * factor, lasts_s=fault.lasts_s * factor)
                for fault in self.faults
            ),
        )

    @property
    def workers(self) -> list[str]:
        """Names of all of them."""
        return [f"{role}-{number}" for role in ROLES for number in range(self.pools.get(role, 0))]

    @property
    def apart(self) -> frozenset[str]:
        """Workers that a cut separates from the others."""
        return frozenset(fault.target for fault in self.faults if fault.what is What.CUT)

    @property
    def needs_root(self) -> bool:
        """Whether a fault takes rights that only root has."""
        return any(fault.what in ROOT_ONLY for fault in self.faults)


def read_plan(path: Path) -> Plan:
    """A plan from its file.

    Raises:
        PlanError: It cannot be read, or is no plan.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None
    try:
        return plan_of(table)
    except (PlanError, TypeError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None


def plan_of(table: Mapping[str, Any]) -> Plan:
    """A plan from a table.

    Raises:
        PlanError, TypeError, ValueError: It is none.
    """
    parts = dict(table)
    phases = tuple(_made(Phase, row) for row in parts.pop("phase", ()))
    faults = tuple(
        _made(Fault, {**row, "what": What(str(row.get("what", "")))}) for row in parts.pop("fault", ())
    )
    load, targets = _made(Load, parts.pop("load", {})), _made(Targets, parts.pop("targets", {}))
    plan = _made(Plan, {**parts, "phases": phases, "faults": faults, "load": load, "targets": targets})
    _check(plan)
    return plan


def _made(kind: type[T], row: Mapping[str, Any]) -> T:
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(row) - known):
        raise PlanError(f"unknown key {unknown[0]} of a {kind.__name__.lower()}")
    return kind(**row)


def _check(plan: Plan) -> None:
    if not plan.phases:
        raise PlanError("no phase")
    if unknown := sorted(set(plan.pools) - set(ROLES)):
        raise PlanError(f"there is no role {unknown[0]}")
    for fault in plan.faults:
        if not 0 <= fault.at_s + fault.lasts_s <= plan.seconds:
            raise PlanError(f"{fault.what} at {fault.at_s:g} s is not over within {plan.seconds:g} s")
        if (fault.what in _LAST) != (fault.lasts_s > 0):
            raise PlanError(f"{fault.what}: lasts_s is {fault.lasts_s:g}")
        if fault.what in _TARGETED and fault.target not in plan.workers:
            raise PlanError(f"{fault.what}: there is no worker {fault.target!r}")
        if fault.what not in _TARGETED and fault.target:
            raise PlanError(f"{fault.what} takes no target")
    if any(fault.what in (What.DISK_FULL, What.SLOW_DISK) for fault in plan.faults) and not plan.pools.get(
        "store"
    ):
        raise PlanError("faults of disks need a store")
