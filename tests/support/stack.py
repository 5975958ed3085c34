"""A whole server of real processes, started through the command line, as tests see it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_SAMPLE = re.compile(r"^([a-zA-Z_:][^{\s]*)(?:\{(.*)\})?\s+(\S+)$")

Samples = Mapping[str, float]


class Stack:
    """One running ``epdserve up``.

    Attributes:
        base_url: Of the router, without ``/v1``.
        model: The name it serves.
    """

    def __init__(self, process: subprocess.Popen[bytes], state_dir: Path) -> None:
        self._process, self._state_dir = process, state_dir
        self.base_url: str = self.state()["url"]
        self.model_dir = Path(self.state()["model_dir"])
        self.http = httpx.Client(base_url=self.base_url, timeout=60, trust_env=False)
        self.model: str = self.http.get("/v1/models").json()["data"][0]["id"]

    @property
    def state_file(self) -> Path:
        """Where ``up`` writes about itself."""
        return self._state_dir / "state.json"

    def state(self) -> dict[str, Any]:
        """What ``up`` wrote about itself, as of now."""
        state: dict[str, Any] = json.loads((self._state_dir / "state.json").read_text())
        return state

    def printed(self) -> str:
        """What ``up`` has printed so far."""
        return self._state_dir.with_suffix(".out").read_text()

    def chat(self, content: str, **fields: Any) -> httpx.Response:
        """One request that is not streamed: greedy, without thinking, 8 tokens, unless told otherwise."""
        return self.http.post("/v1/chat/completions", json=self.body(content, **fields))

    def body(self, content: str, **fields: Any) -> dict[str, Any]:
        """The body that ``chat`` sends."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 8,
            "thinking": {"type": "disabled"},
            **fields,
        }

    def metrics(self) -> dict[str, Samples]:
        """Samples of every process by its name; labelled ones as ``name{label="value"}``."""
        addresses = {"router": self.base_url}
        addresses |= {w["worker"]: f"http://{w['metrics_address']}" for w in self.state()["workers"]}
        return {
            name: _samples(httpx.get(f"{url}/metrics", timeout=10).text) for name, url in addresses.items()
        }

    def assert_conserved(self, *, within_s: float = 10.0) -> None:
        """Everything that requests held is free again, and every page is in one phase."""
        give_up_at = time.monotonic() + within_s
        while held := self._held():
            assert time.monotonic() < give_up_at, f"still held after {within_s} s: {held}"
            time.sleep(0.02)

    def kill_worker(self, role: str) -> str:
        """SIGKILL the first worker of a role; returns its name. Ray brings up another one."""
        victim = next(worker for worker in self.state()["workers"] if worker["role"] == role)
        os.kill(victim["pid"], signal.SIGKILL)
        return str(victim["worker"])

    def wait_until(self, condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
        """Poll ``condition`` until it holds."""
        give_up_at = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < give_up_at, f"not within {within_s} s"
            time.sleep(0.05)

    def ready(self) -> bool:
        """Whether the router would take a request now."""
        return self.http.get("/ready").status_code == httpx.codes.OK

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop all of it; returns the exit status. No process of it may be left."""
        self.http.close()
        state = self.state()
        pids = [*state["processes"].values(), *(worker["pid"] for worker in state["workers"])]
        self._process.send_signal(number)
        status = self._process.wait(STOP_TIMEOUT_S)
        self.wait_until(lambda: not still_running(pids))
        return status

    def _held(self) -> dict[str, float]:
        held: dict[str, float] = {}
        for process, samples in self.metrics().items():
            for name, value in samples.items():
                # What a store keeps of its machine's blocks and tails is a cache, not something held
                if value and _is_held(name) and not (process.startswith("store") and "slots" in name):
                    held[f"{process}:{name}"] = value
        return held


def still_running(pids: Iterable[int]) -> list[int]:
    """Those of the processes that have not ended."""

    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return [pid for pid in pids if runs(pid)]


def _is_held(name: str) -> bool:
    return name in {
        "epdserve_router_in_flight_requests",
        "epdserve_kvstore_leases",
        "epdserve_kvstore_transfers_pending",
        "epdserve_kvstore_pages_missing",
        'epdserve_kvstore_pages{phase="filling"}',
        'epdserve_kvstore_pages{phase="sealed"}',
        'epdserve_kvstore_pages{phase="quarantined"}',
    } or (name.startswith("epdserve_kvstore_slots{") and 'state="free"' not in name)


def _samples(text: str) -> Samples:
    samples = {}
    for line in text.splitlines():
        if match := _SAMPLE.match(line):
            name, labels, value = match.groups()
            samples[f"{name}{{{labels}}}" if labels else name] = float(value)
    return samples


@contextmanager
def running_stack(
    state_dir: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """``epdserve up`` with its files under ``state_dir``, until the block ends.

    Raises:
        AssertionError: It did not come up, or did not end well.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "epdserve.services.cli",
        "up",
        "--state-dir",
        str(state_dir),
        *arguments,
    ]
    output = state_dir.with_suffix(".out")
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    try:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not (state_dir / "state.json").is_file():
            assert process.poll() is None, f"up ended with {process.returncode}:\n{output.read_text()}"
            assert time.monotonic() < give_up_at, f"up is not ready:\n{output.read_text()}"
            time.sleep(0.1)
        stack = Stack(process, state_dir)
        yield stack
        if process.poll() is None:
            status = stack.stop()
            assert status == 0, f"up ended with {status}:\n{output.read_text()}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
