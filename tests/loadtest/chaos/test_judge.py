"""What counts as fine."""

from typing import Any

from epdserve.loadtest.chaos.judge import Asked, judge, rows
from epdserve.loadtest.chaos.plan import Plan, plan_of
from epdserve.loadtest.results.record import Ending
from support.loads import record


def plan(*faults: dict[str, Any], **phase: Any) -> Plan:
    phases = [
        {"name": "steady", "seconds": 10, "load": 0.5, "in_time_ratio": 0.9},
        {"name": "overload", "seconds": 10, "load": 2.0, "goodput_ratio": 0.9, "refusals": True, **phase},
    ]
    return plan_of({"name": "p", "phase": phases, "fault": list(faults), "targets": {"ttft_s": 1.0}})


def asked(at_s: float, **changes: Any) -> Asked:
    return Asked(record(at_s=at_s, expected=False, **changes))


FINE = [asked(0.5 * number) for number in range(40)]
KILL = {"at_s": 2, "what": "kill", "target": "decode-0", "recovery_s": 3}


def test_a_run_without_trouble_is_fine() -> None:
    verdict = judge(plan(KILL), FINE, {})
    assert verdict.problems == []
    assert [row.goodput_per_s for row in verdict.phases] == [2.0, 2.0]
    assert verdict.faults[0].recovery_s == 0.0
    phases, faults = rows(verdict)
    assert (len(phases), len(faults)) == (3, 2)


def test_late_answers_cost_the_phase_its_share_and_the_fault_its_recovery() -> None:
    late = [asked(one.record.at_s, ttft_s=5.0 if 2 <= one.record.at_s < 6 else 0.1) for one in FINE]
    verdict = judge(plan(KILL), late, {})
    assert verdict.faults[0].recovery_s == 4.0
    assert [problem.split(":")[0] for problem in verdict.problems] == ["steady", "kill decode-0 at 2 s"]


def test_who_never_recovers_before_the_next_fault_is_told() -> None:
    faults = (KILL, {"at_s": 4, "what": "kill", "target": "decode-1"})
    late = [asked(one.record.at_s, ttft_s=5.0 if 3 <= one.record.at_s < 5 else 0.1) for one in FINE]
    verdict = judge(plan(*faults), late, {})
    assert verdict.faults[0].recovery_s is None
    assert verdict.faults[1].recovery_s == 1.0
    assert any("not before the next one" in problem for problem in verdict.problems)


def test_goodput_that_collapses_under_overload_is_told() -> None:
    thin = [one for one in FINE if one.record.at_s < 10 or one.record.at_s % 1 == 0]
    [problem] = judge(plan(), thin, {}).problems
    assert "0.50 of the best" in problem


def test_invariants_hold_whatever_the_phase() -> None:
    trouble = [
        Asked(record(at_s=1.0), right=False),
        asked(11.0, ending=Ending.FAILED, status=200, error="worker lost", ttft_s=0.1),
        asked(12.0, ending=Ending.FAILED, status=0, error="ConnectError"),
        asked(13.0, ending=Ending.REFUSED, status=429, error="429"),  # right here
        asked(3.0, ending=Ending.REFUSED, status=429, error="429: full"),
    ]
    problems = judge(plan(goodput_ratio=0.0), [*FINE, *trouble], {"decode-0": {"leases": 1.0}}).problems
    assert [problem.split(":")[0] for problem in problems] == [
        "1 wrong answers",
        "1 lost streams",
        "1 failed requests",
        "1 refusals where none is right",
        "decode-0 still holds {'leases'",
    ]


def test_silence_is_not_fine() -> None:
    assert judge(plan(), FINE[:20], {}).problems[0] == "overload: no answer was whole"
