"""The alert rules fire on what they are for and stay quiet beside it; dashboards and the metrics table are fresh."""

import subprocess
import sys

import pytest
import yaml
from support.repository import ROOT

RULES = ROOT / "helm/epdserve/files/rules"
TESTS = ROOT / "deploy/prometheus/tests"
needs_promtool = pytest.mark.needs("promtool")


def promtool(*arguments: object) -> None:
    run = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@needs_promtool
def test_rules_are_valid() -> None:
    promtool("check", "rules", *sorted((ROOT / "deploy/prometheus").glob("*.yaml")))


@needs_promtool
@pytest.mark.parametrize("file", sorted(TESTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_rules_do_what_their_tests_say(file: object) -> None:
    promtool("test", "rules", file)


def alerts() -> dict[str, dict[str, object]]:
    groups = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_every_alert_has_tests_that_fire_it_and_that_do_not() -> None:
    fired, quiet = set(), set()
    for file in TESTS.glob("*.yaml"):
        for test in yaml.safe_load(file.read_text())["tests"]:
            for each in test["alert_rule_test"]:
                (fired if each.get("exp_alerts") else quiet).add(each["alertname"])
    assert set(alerts()) - fired == set()
    assert set(alerts()) - quiet <= {"EpdserveRefusesRequests", "EpdserveFirstTokensLate"}


def test_every_alert_is_explained_in_the_runbook() -> None:
    text = (ROOT / "deploy/README.md").read_text()
    assert [name for name in alerts() if f"`{name}`" not in text] == []


@pytest.mark.parametrize("script", ["dashboards.py", "metrics_reference.py"])
def test_what_is_generated_is_fresh(script: str) -> None:
    command = [sys.executable, "-P", ROOT / "deploy" / script, "--check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
