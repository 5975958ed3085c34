"""Whether a run was fine: pure arithmetic over what was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epdserve.loadtest.chaos.plan import Fault, Phase, Plan
from epdserve.loadtest.figures import Spread
from epdserve.loadtest.results.record import Ending, Record, Slo


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its record, and whether a whole answer was the right one."""

    record: Record
    right: bool = True


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """Figures of one phase."""

    name: str
    load: float
    requests: int
    whole: int
    refused: int
    goodput_per_s: float
    in_time_ratio: float
    ttft_s: Spread | None


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One fault and what followed.

    Attributes:
        recovery_s: From the fault until every later request, up to the next fault, was whole and in time; None if the
            last one was not.
    """

    fault: Fault
    recovery_s: float | None


@dataclass(slots=True)
class Verdict:
    """All of it; fine if ``problems`` is empty."""

    phases: list[PhaseRow] = field(default_factory=list)
    faults: list[FaultRow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def judge(plan: Plan, asked: Sequence[Asked], left_over: Mapping[str, Mapping[str, float]]) -> Verdict:
    """Compare what was seen with what was declared.

    Args:
        left_over: What workers still held when nothing was asked any more.
    """
    slo = Slo(plan.targets.ttft_s, plan.targets.tpot_s)
    verdict = Verdict()
    start = 0.0
    for phase in plan.phases:
        inside = [one for one in asked if start <= one.record.at_s < start + phase.seconds]
        verdict.phases.append(_phase(phase, inside, slo))
        start += phase.seconds
    best = max(row.goodput_per_s for row in verdict.phases)
    for phase, row in zip(plan.phases, verdict.phases, strict=True):
        verdict.problems += _phase_problems(phase, row, best)
    for fault in plan.faults:
        recovery_s = recovery(plan, fault, [one.record for one in asked], slo)
        verdict.faults.append(FaultRow(fault, recovery_s))
        if fault.recovery_s and (recovery_s is None or recovery_s > fault.recovery_s):
            told = "not before the next one" if recovery_s is None else f"after {recovery_s:.1f} s"
            verdict.problems.append(
                f"{_name(fault)}: targets met again {told}, {fault.recovery_s:g} s allowed"
            )
    verdict.problems += _invariants(plan, asked)
    verdict.problems += [f"{worker} still holds {dict(held)}" for worker, held in left_over.items()]
    return verdict


def _phase(phase: Phase, asked: Sequence[Asked], slo: Slo) -> PhaseRow:
    records = [one.record for one in asked]
    good = sum(record.meets(slo) for record in records)
    return PhaseRow(
        phase.name,
        phase.load,
        len(records),
        sum(record.ok for record in records),
        sum(record.ending is Ending.REFUSED for record in records),
        good / phase.seconds,
        good / len(records) if records else 0.0,
        Spread.of(record.ttft_s for record in records if record.ok),
    )


def _phase_problems(phase: Phase, row: PhaseRow, best: float) -> list[str]:
    found = []
    if not row.whole:
        found.append(f"{phase.name}: no answer was whole")
    if row.in_time_ratio < phase.in_time_ratio:
        found.append(f"{phase.name}: {row.in_time_ratio:.1%} in time, {phase.in_time_ratio:.1%} wanted")
    if row.goodput_per_s < phase.goodput_ratio * best:
        found.append(
            f"{phase.name}: goodput {row.goodput_per_s:.2f}/s is {row.goodput_per_s / best:.2f} of the best, "
            f"{phase.goodput_ratio:g} wanted"
        )
    return found


def recovery(plan: Plan, fault: Fault, records: Sequence[Record], slo: Slo) -> float | None:
    """Seconds from a fault until requests were whole and in time again; None if not before the next fault."""
    later = [other.at_s for other in plan.faults if other.at_s > fault.at_s]
    until = min(later, default=plan.seconds)
    # who was sent shortly before may be hit by it as well
    seen = sorted((r for r in records if fault.at_s <= r.at_s < until), key=lambda record: record.at_s)
    last_bad = next((r for r in reversed(seen) if not r.meets(slo)), None)
    if last_bad is None:
        return 0.0
    after = [record for record in seen if record.at_s > last_bad.at_s]
    return after[0].at_s - fault.at_s if after else None


def _invariants(plan: Plan, asked: Sequence[Asked]) -> list[str]:
    """No wrong answer, no lost stream, no refusal where none is right."""
    found = []
    wrong = sum(not one.right for one in asked)
    lost = [one.record for one in asked if one.record.status == 200 and not one.record.ok]
    broken = [
        one.record
        for one in asked
        if not one.record.ok and one.record.status != 200 and one.record.ending is not Ending.REFUSED
    ]
    if wrong:
        found.append(f"{wrong} wrong answers")
    if lost:
        found.append(f"{len(lost)} lost streams: {lost[0].error or lost[0].ending}")
    if broken:
        found.append(f"{len(broken)} failed requests: {broken[0].error or broken[0].ending}")
    refused = [one.record for one in asked if one.record.ending is Ending.REFUSED]
    if astray := [record for record in refused if not phase_at(plan, record.at_s).refusals]:
        found.append(f"{len(astray)} refusals where none is right: {astray[0].error}")
    return found


def phase_at(plan: Plan, at_s: float) -> Phase:
    """The phase of a moment."""
    end = 0.0
    for phase in plan.phases:
        end += phase.seconds
        if at_s < end:
            return phase
    return plan.phases[-1]


def _name(fault: Fault) -> str:
    return f"{fault.what} {fault.target} at {fault.at_s:g} s".replace("  ", " ")


def rows(verdict: Verdict) -> tuple[list[list[str]], list[list[str]]]:
    """Phases and faults as text, headings first."""
    phases = [["phase", "load", "requests", "whole", "refused", "goodput/s", "in time", "TTFT s p50 / p99"]]
    for row in verdict.phases:
        ttft = "-" if row.ttft_s is None else f"{row.ttft_s.p50:.2f} / {row.ttft_s.p99:.2f}"
        cells = [str(row.requests), str(row.whole), str(row.refused), f"{row.goodput_per_s:.2f}"]
        phases.append([row.name, f"{row.load:g}", *cells, f"{row.in_time_ratio:.1%}", ttft])
    faults = [["at s", "what", "target", "lasts s", "targets met again after s"]]
    for one in verdict.faults:
        again = "not before the next" if one.recovery_s is None else f"{one.recovery_s:.1f}"
        fault = one.fault
        faults.append([f"{fault.at_s:g}", fault.what.value, fault.target, f"{fault.lasts_s:g}", again])
    return phases, faults
