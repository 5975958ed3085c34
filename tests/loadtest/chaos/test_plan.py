"""Plans are read whole or not at all."""

from pathlib import Path
from typing import Any

import pytest
from epdserve.loadtest.chaos.cluster import toml_of
from epdserve.loadtest.chaos.plan import PlanError, What, plan_of, read_plan
from support.repository import ROOT

PHASE = {"name": "steady", "seconds": 10, "load": 1.0}
PLANS = sorted((ROOT / "loadtest/chaos/plans").glob("*.toml"))


def plan(*faults: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "p", "phase": [PHASE], "fault": list(faults), **more}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_plan_of_the_repository_can_be_read(path: Path) -> None:
    assert read_plan(path).phases


def test_the_long_plan_has_every_fault_and_lasts_twenty_minutes() -> None:
    found = read_plan(ROOT / "loadtest/chaos/plans/twenty_minutes.toml")
    assert {fault.what for fault in found.faults} == set(What)
    assert found.seconds == 1200


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"name": "p"}, "no phase"),
        (plan(colour="red"), "unknown key colour"),
        (plan({"at_s": 1, "what": "flood"}), "flood"),
        (plan({"at_s": 1, "what": "kill", "target": "decode-9"}), "no worker 'decode-9'"),
        (plan({"at_s": 11, "what": "redis", "lasts_s": 1}), "not over within 10 s"),
        (plan({"at_s": 1, "what": "redis"}), "lasts_s is 0"),
        (plan({"at_s": 1, "what": "kill", "target": "decode-0", "lasts_s": 2}), "lasts_s is 2"),
        (plan({"at_s": 1, "what": "redis", "lasts_s": 1, "target": "decode-0"}), "takes no target"),
        (
            plan({"at_s": 1, "what": "disk full", "lasts_s": 1}, pools={"prefill": 1, "decode": 1}),
            "need a store",
        ),
        (plan(pools={"router": 2}), "no role router"),
        (plan(load={"speed": 1}), "unknown key speed"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_in_words(table: dict[str, Any], why: str) -> None:
    with pytest.raises((PlanError, ValueError), match=why):
        plan_of(table)


def test_settings_are_written_as_the_server_reads_them() -> None:
    import tomllib

    table = {"a": 1, "t": {"x": [{"f": "p", "n": 2}], "u": {"b": True, "s": 'q"'}}}
    assert tomllib.loads(toml_of(table)) == table


def test_a_shortened_plan_is_the_same_in_less_time() -> None:
    whole = read_plan(ROOT / "loadtest/chaos/plans/twenty_minutes.toml")
    short = whole.shortened(0.25)
    assert short.seconds == 300
    assert [fault.at_s * 4 for fault in short.faults] == [fault.at_s for fault in whole.faults]
    assert [fault.recovery_s for fault in short.faults] == [fault.recovery_s for fault in whole.faults]
