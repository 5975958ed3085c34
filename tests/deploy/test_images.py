"""Images, the compose file and the examples: linted, without root, and made of commands that there are."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from epdserve.services.cli.__main__ import app
from epdserve.services.cli.roles import Cluster
from support.chart import CHART, helm, objects_of, wrong_with
from support.repository import ROOT
from typer.main import get_command

DEPLOY = ROOT / "deploy"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def ours() -> dict[str, dict[str, Any]]:
    return {
        name: each for name, each in compose()["services"].items() if each["image"].startswith("epdserve/")
    }


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    run = subprocess.run(
        [hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_both_images_end_without_root_and_the_router_without_torch() -> None:
    stages = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")
    by_name = {stage.splitlines()[0].split()[-1]: stage for stage in stages[1:]}
    assert {"build", "base", "router", "worker"} <= set(by_name)
    for name in ("router", "worker"):
        assert [line for line in by_name[name].splitlines() if line.startswith("USER")] == [
            "USER 10001:10001"
        ]
    assert "torch==2.13.0" in by_name["worker"]
    assert "[worker]" not in by_name["router"]
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not [pin for pin in pins if pin.startswith(("torch", "ray", "nixl", "triton"))]


def test_the_build_sends_no_more_than_the_packages() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    copied = {
        word
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert lines[0] == "**"
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied


def test_services_of_the_compose_file_run_commands_that_there_are_without_rights() -> None:
    commands: Any = get_command(app)
    for name, service in ours().items():
        assert service["read_only"], name
        assert service["user"] == "10001:10001", name
        assert service["cap_drop"] == ["ALL"], name
        words = service["command"]
        if words[0] == "epdserve":
            known = {option for each in commands.commands[words[1]].params for option in each.opts}
            assert {word.partition("=")[0] for word in words[2:] if word.startswith("--")} <= known
    places = {
        name: each["environment"]
        for name, each in ours().items()
        if "EPDSERVE_HOST" in each.get("environment", {})
    }
    assert set(places) == {"prefill", "decode", "store"}
    assert all(place["EPDSERVE_HOST"] == name for name, place in places.items())
    published = [port for each in compose()["services"].values() for port in each.get("ports", [])]
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_processes_take_the_example_configuration(tmp_path: Path) -> None:
    cluster = Cluster(DEPLOY / "examples/compose.toml", tmp_path, "redis://registry", tmp_path / "token")
    assert cluster.settings().router.tenancy.open_without_keys


def test_mounted_examples_are_there() -> None:
    for service in compose()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source


@pytest.mark.needs("helm4")
def test_the_raycluster_example_is_what_the_chart_renders() -> None:
    show = ("--show-only", "templates/raycluster.yaml", "-n", "llm")
    run = helm("helm4", "template", "epd", CHART, "-f", CHART / "ci/1p1d.yaml", *show)
    example = (DEPLOY / "examples/raycluster.yaml").read_text()
    assert objects_of(example) == objects_of(run.stdout), "render it again; its first lines say how"
    assert [wrong_with(found) for found in objects_of(example)] == [""]


@pytest.mark.slow
@pytest.mark.needs("git")
def test_steps_of_the_dockerfile_that_need_no_container_run() -> None:
    """``pytest -m slow tests/deploy/test_images.py``; installs the router's packages."""
    run = subprocess.run(
        [sys.executable, "-P", DEPLOY / "image_steps.py"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "router: starts, no torch" in run.stdout
