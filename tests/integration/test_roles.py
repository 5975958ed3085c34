"""A cluster of processes as containers run them: one role each, at fixed ports, with probes and a drain. No Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from epdserve.model.demo.writer import write_demo_model
from epdserve.services.cli.up import free_port
from support.roles import Role, cluster_of_roles


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Role]]:
    folder = tmp_path_factory.mktemp("roles")
    model_dir = write_demo_model(folder / "demo-model")
    with cluster_of_roles(
        folder, model_dir, ("prefill", "decode", "store"), router_port=free_port()
    ) as started:
        yield started


def test_an_answer_comes_and_every_process_tells_its_metrics_at_the_port_it_was_given(
    roles: dict[str, Role],
) -> None:
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    answer = httpx.post(f"{roles['router'].url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    for name in ("prefill", "decode", "store"):
        text = httpx.get(f"http://127.0.0.1:{roles[name].metrics_port}/metrics", trust_env=False).text
        assert "epdserve_" in text
        assert httpx.get(f"{roles[name].url}/ready", trust_env=False).status_code == 200
        assert httpx.get(f"{roles[name].url}/live", trust_env=False).status_code == 200


def test_the_last_act_before_a_pod_goes_drains_its_worker(roles: dict[str, Role]) -> None:
    decode = roles["decode"]
    command = [sys.executable, "-P", "-m", "epdserve.services.cli", "stop-worker", "--wait-s", "30"]
    run = subprocess.run(
        [*command, "--pid-file", str(decode.pid_file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert decode.process.wait(10) == 0
    assert not decode.pid_file.exists()
    assert httpx.get(f"{roles['router'].url}/ready", trust_env=False).status_code == 503
    assert '"worker ended"' in decode.log.read_text()


def test_sigterm_ends_the_others_cleanly(roles: dict[str, Role]) -> None:
    for name in ("router", "prefill", "store"):
        os.kill(roles[name].process.pid, signal.SIGTERM)
    assert {roles[name].process.wait(30) for name in ("router", "prefill", "store")} == {0}


def test_a_worker_that_cannot_start_says_why_in_one_line(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    command = [sys.executable, "-P", "-m", "epdserve.services.cli", "worker", "prefill"]
    run = subprocess.run(
        [
            *command,
            "--model",
            str(tmp_path),
            "--registry",
            "redis://127.0.0.1:1/0",
            "--token-file",
            str(token),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("epdserve: prefill worker prefill-0: ")
