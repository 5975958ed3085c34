"""Processes of single roles around one registry, as an orchestrator starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from epdserve.services.cli.up import free_port
from support.valkey import url_of, valkey_server

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Role:
    """One process; ``url`` is where its probes, or its API, answer."""

    process: subprocess.Popen[bytes]
    url: str
    metrics_port: int
    pid_file: Path
    log: Path


@contextmanager
def cluster_of_roles(
    folder: Path, model_dir: Path, workers: Sequence[str], *, router_port: int
) -> Iterator[dict[str, Role]]:
    """A router and one worker of each role, ready; all of them are gone when the block ends."""
    (folder / "token").write_text("0123456789abcdef0123456789abcdef")
    (folder / "epdserve.toml").write_text("[pool]\ndrain_timeout_s = 5.0\n")
    with ExitStack() as exits:
        registry = url_of(exits.enter_context(valkey_server()))
        common = {
            "EPDSERVE_CONFIG": str(folder / "epdserve.toml"),
            "EPDSERVE_MODEL": str(model_dir),
            "EPDSERVE_REGISTRY": registry,
            "EPDSERVE_TOKEN_FILE": str(folder / "token"),
        }
        started = {name: _worker(folder, name, common, exits) for name in workers}
        started["router"] = _router(folder, router_port, common, exits)
        for role in started.values():
            _wait(role)
        yield started


def _worker(folder: Path, name: str, common: dict[str, str], exits: ExitStack) -> Role:
    probe, metrics, pid_file = free_port(), free_port(), folder / f"{name}.pid"
    place = {
        "EPDSERVE_NAME": f"{name}-0",
        "EPDSERVE_PORT": str(free_port()),
        "EPDSERVE_METRICS_PORT": str(metrics),
        "EPDSERVE_PROBE_PORT": str(probe),
        "EPDSERVE_MACHINE": "node-a",
        "EPDSERVE_PID_FILE": str(pid_file),
    }
    process = _start(folder / f"{name}.log", ["worker", name], {**common, **place}, exits)
    return Role(process, f"http://127.0.0.1:{probe}", metrics, pid_file, folder / f"{name}.log")


def _router(folder: Path, port: int, common: dict[str, str], exits: ExitStack) -> Role:
    process = _start(folder / "router.log", ["router", "--port", str(port)], common, exits)
    return Role(process, f"http://127.0.0.1:{port}", port, folder / "router.pid", folder / "router.log")


def _start(
    log: Path, arguments: Sequence[str], env: dict[str, str], exits: ExitStack
) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "epdserve.services.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
        )

    def end() -> None:
        process.kill()
        process.wait()

    exits.callback(end)
    return process


def _wait(role: Role) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while True:
        assert role.process.poll() is None, role.log.read_text()
        assert time.monotonic() < give_up_at, role.log.read_text()
        try:
            if httpx.get(f"{role.url}/ready", timeout=2, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
