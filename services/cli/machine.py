"""All processes of one machine: registry, router, Ray and its workers; started in order, ended in reverse.

Ray and the workers are the pool supervisor's; this file composes them with the rest and says what happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from epdserve.services.cli.children import Child, log_tail
from epdserve.services.cli.embedded_registry import start_registry
from epdserve.services.cli.errors import CommandError
from epdserve.services.cli.settings import UpSettings
from epdserve.services.config import config_text
from epdserve.services.errors import ServiceError
from epdserve.services.observability.tracing import VARIABLE
from epdserve.services.pool.supervisor import Supervisor, WorkerStatus, start_ray, stop_ray
from epdserve.services.router.listening import bind
from epdserve.services.router.tenancy.assembly import listening_host
from epdserve.services.store.config import SsdDirectorySettings, StoreSettings
from epdserve.services.store.geometry import StoreGeometry
from pydantic import BaseModel

READY_TIMEOUT_S = 60.0
WATCH_S = 0.25
ROUTER_ENDS, ROUTER_ENDS_S = 3, 10.0
PREFILL_MODULE = "epdserve.services.prefill.service"
DECODE_MODULE = "epdserve.services.decode.service"
ENCODE_MODULE = "epdserve.services.encode.service"
STORE_MODULE = "epdserve.services.store.service"


@dataclass(frozen=True, slots=True)
class Folders:
    """Where things are kept.

    Attributes:
        state: Stays after the end: logs, the router's settings, ``state.json`` while everything is up.
        scratch: Goes at the end; a short path, since sockets lie in it.
    """

    state: Path
    scratch: Path

    @property
    def logs(self) -> Path:
        """Log files of all processes."""
        return self.state / "logs"

    @property
    def state_file(self) -> Path:
        """What runs, for tools and tests; there only while all of it is ready."""
        return self.state / "state.json"


class RouterEnds:
    """Tells a router that is restarted now and then from one that cannot live."""

    def __init__(self) -> None:
        self._at: list[float] = []

    def too_many(self, now: float) -> bool:
        """Count an end; whether it is the third within ten seconds."""
        self._at = [at for at in self._at if now - at < ROUTER_ENDS_S] + [now]
        return len(self._at) >= ROUTER_ENDS


class Machine:
    """One machine's processes. Owned by the main thread's event loop: Ray wants to be started there.

    Args:
        settings: Of every role.
        folders: Where things are kept; must exist.
        say: Told each step in one line.
    """

    def __init__(self, settings: UpSettings, folders: Folders, say: Callable[[str], None]) -> None:
        self._settings, self._folders, self._say = settings, folders, say
        self._registry: Child | None = None
        self._router: Child | None = None
        self._door: socket.socket | None = None
        self._ends = RouterEnds()
        self._supervisor: Supervisor | None = None
        self._ray = False
        self._workers: list[WorkerStatus] = []
        router = settings.router
        # An address to listen on is not always one to connect to.
        host = "127.0.0.1" if router.host == "0.0.0.0" else router.host
        self.url = f"http://[{host}]:{router.port}" if ":" in host else f"http://{host}:{router.port}"

    async def start(self) -> None:
        """Start everything; returns once the router takes requests.

        Raises:
            CommandError: Something did not start; what did is still to be stopped.
        """
        self._say("registry: Valkey on a socket file")
        await self._start_registry()
        self._say(f"router: {self.url}")
        self._door = self._open_door()
        self._router = router = self._start_router()
        self._say("Ray")
        self._start_ray()
        await self._start_workers()
        await router.wait_until(self._is_ready, timeout_s=READY_TIMEOUT_S)
        self._write_state()

    async def watch(self) -> str:
        """Follow what happens; returns why everything must end.

        A worker's or the registry's death is told and is no reason: another life follows, and clients see nothing.
        Nor is a router's, unless they end one after the other: connections wait at the door for the next one.

        Raises:
            CommandError: The registry did not start again.
        """
        assert self._supervisor is not None, "watch before start"
        assert self._router is not None, "watch before start"
        while True:
            if status := self._router.exit_status():
                told = f"the router ended with {status}"
                if self._ends.too_many(time.monotonic()):
                    return f"{told}; {self._router.log} ends with:\n{log_tail(self._router.log)}"
                self._say(f"{told} and is started again; see {self._router.log}")
                self._router = self._start_router()
                self._write_state()
            if self._registry is not None and (status := self._registry.exit_status()):
                self._say(f"the registry ended with {status} and is started again; see {self._registry.log}")
                await self._start_registry()
                self._write_state()
            now = self._supervisor.workers()
            if now != self._workers:
                self._tell_changes(now)
                self._workers = now
                self._write_state()
            await asyncio.sleep(WATCH_S)

    async def stop(self, *, drain_s: float) -> None:
        """End everything: the router first, so that no request meets a worker that goes away."""
        self._folders.state_file.unlink(missing_ok=True)
        self._close_door()
        if self._router is not None:
            await self._router.stop(timeout_s=drain_s)
        if self._supervisor is not None:
            await self._supervisor.stop_all(drain_s)
        if self._registry is not None:
            await self._registry.stop()
        self.kill()

    def kill(self) -> None:
        """End everything that still runs, without warning."""
        self._close_door()
        for child in (self._router, self._registry):
            if child is not None:
                child.kill()
        if self._ray:
            self._ray = False
            stop_ray()
        self._keep_worker_logs()

    async def _start_registry(self) -> None:
        self._registry = await start_registry(self._folders.scratch, log=self._folders.logs / "registry.log")

    def _open_door(self) -> socket.socket:
        """Where clients connect. Ours, and lent to the router, so that they can while one ends and another starts.

        Raises:
            CommandError: The address is taken.
        """
        router = self._settings.router
        keyless = not (router.keys_file or router.tenancy.tenants_file or router.tenancy.tenants_in_redis)
        try:
            return bind(listening_host(router.host, router.tenancy, keyless=keyless), router.port)
        except ServiceError as error:
            raise CommandError(f"{error}; choose another one with --port") from None

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()
            self._door = None

    def _start_router(self) -> Child:
        assert self._door is not None, "a router before its door"
        settings_file = self._folders.state / "router.toml"
        settings_file.write_text(config_text(self._settings.router), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "epdserve.services.router", "--config", str(settings_file)]
        return Child(
            "router",
            [*command, "--listen-fd", str(self._door.fileno())],
            log=self._folders.logs / "router.log",
            env={"PYTHONSAFEPATH": "1"},
            descriptors=[self._door.fileno()],
        )

    def _start_ray(self) -> None:
        os.environ["RAY_TMPDIR"] = str(
            self._folders.scratch
        )  # its default is shared by everybody on the machine
        logging.getLogger("ray").handlers[:] = [logging.FileHandler(self._folders.logs / "ray.log")]
        link = self._folders.logs / "ray"
        link.unlink(missing_ok=True)
        link.symlink_to(self._ray_logs())
        start_ray(log_to_driver=False)
        self._ray = True

    async def _start_workers(self) -> None:
        settings = self._settings
        self._supervisor = supervisor = Supervisor(settings.pool, log_level=settings.machine.log_level)
        wanted: list[tuple[str, str, BaseModel, int]] = [
            ("prefill", PREFILL_MODULE, settings.prefill, settings.machine.prefill_workers),
            ("decode", DECODE_MODULE, settings.decode, settings.machine.decode_workers),
        ]
        if settings.machine.encode_workers:
            wanted.append(("encode", ENCODE_MODULE, settings.encode, settings.machine.encode_workers))
        if settings.machine.store:
            wanted.append(("store", STORE_MODULE, self._store_settings(), 1))
        self._say("workers: " + ", ".join(f"{count} {role}" for role, _, _, count in wanted))
        # The caller's thread count reaches the workers: a measurement must be able to set it.
        env = {
            name: os.environ[name] for name in ("OMP_NUM_THREADS", "UCX_TLS", VARIABLE) if name in os.environ
        }
        try:
            async with asyncio.TaskGroup() as group:
                for role, module, section, count in wanted:
                    table = section.model_dump(mode="json")
                    group.create_task(supervisor.start(role, module, table, count, env=env))
        except* ServiceError as errors:
            reason = "; ".join(str(error) for error in errors.exceptions)
            raise CommandError(f"a worker did not start: {reason}; logs: {self._folders.logs}") from None
        self._workers = supervisor.workers()

    def _store_settings(self) -> StoreSettings:
        """The store's, with an SSD tier below the state folder unless the file names other directories."""
        store, ssd_bytes = self._settings.store, self._settings.machine.ssd_bytes
        if store.ssd.directories or not ssd_bytes:
            return store
        # a directory holds blocks of one size: another model has one of its own
        folder = self._folders.state / "ssd" / str(StoreGeometry.of(store).payload_bytes)
        directory = SsdDirectorySettings(folder=folder, capacity_bytes=ssd_bytes)
        return store.model_copy(update={"ssd": store.ssd.model_copy(update={"directories": (directory,)})})

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _tell_changes(self, now: list[WorkerStatus]) -> None:
        before = {status.worker: status for status in self._workers}
        for status in now:
            if not status.running and before[status.worker].running:
                self._say(f"{status.worker} has ended and is started again; logs: {self._folders.logs}")
            elif status.running and before[status.worker].pid != status.pid:
                self._say(f"{status.worker} is back, life {status.lives}")

    def _write_state(self) -> None:
        state: dict[str, Any] = {
            "url": self.url,
            "model": self._settings.router.model_name,
            "model_dir": str(self._settings.router.model_dir),
            "logs": str(self._folders.logs),
            "processes": {
                child.name: child.pid for child in (self._registry, self._router) if child is not None
            },
            "workers": [asdict(status) for status in self._workers],
        }
        fresh = self._folders.state_file.with_suffix(".new")
        fresh.write_text(json.dumps(state, indent=1), encoding="utf-8")
        fresh.replace(self._folders.state_file)

    def _ray_logs(self) -> Path:
        return self._folders.scratch / "ray" / "session_latest" / "logs"

    def _keep_worker_logs(self) -> None:
        """Ray writes workers' logs into its own folder, which goes at the end; until then a link leads there."""
        (self._folders.logs / "ray").unlink(missing_ok=True)
        for log in self._ray_logs().glob("worker-*.err"):
            with contextlib.suppress(OSError):
                if log.stat().st_size:
                    shutil.copy(log, self._folders.logs / log.name)
