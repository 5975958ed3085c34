"""One role in this process, for orchestrators that start processes: a worker, a router, or Ray's supervisor.

All of them read the file that ``up`` reads. What differs from pod to pod (address, ports, machine, secrets) comes from
the command line or the environment, and never stands in the file.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from epdserve.services.cli.errors import CommandError
from epdserve.services.config import ConfigError
from epdserve.services.errors import ServiceError

if TYPE_CHECKING:
    from epdserve.services.cli.settings import UpSettings
    from epdserve.services.pool.place import Place
    from epdserve.services.pool.worker_runner import WorkerRunner

MODULES: Final[Mapping[str, str]] = {
    role: f"epdserve.services.{role}.service" for role in ("prefill", "decode", "encode", "store")
}
_STOP_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Cluster:
    """What every process of an installation is told alike.

    Attributes:
        config: As for ``up``; None = defaults.
        model: The checkpoint's folder.
        registry: URL of the Redis or Valkey.
        token_file: Holds the cluster token.
    """

    config: Path | None
    model: Path
    registry: str
    token_file: Path

    def settings(self) -> UpSettings:
        """Of all roles.

        Raises:
            CommandError: The file does not fit.
        """
        from epdserve.services.cli.settings import Chosen, fill_in, read_table

        chosen = Chosen(self.model, self.registry, self.token_file)
        return fill_in(read_table(self.config), chosen, port=None, source=self.source)

    @property
    def source(self) -> str:
        """Named in errors."""
        return str(self.config) if self.config else "defaults"


def run_worker(role: str, cluster: Cluster, place: Place, *, name: str, check: bool) -> None:
    """One worker until SIGTERM, then its drain.

    Raises:
        CommandError: It cannot start, or its life ended otherwise than by being told so.
    """
    from epdserve.services.config import config_text
    from epdserve.services.observability.logs import setup_logging
    from epdserve.services.pool.worker_runner import Ending, WorkerRunner

    if role not in MODULES:
        raise CommandError(f"there is no role {role}; roles are {', '.join(sorted(MODULES))}")
    settings = cluster.settings()
    section = getattr(settings, role)
    if check:
        print(config_text(section), end="")
        return
    setup_logging(level=settings.machine.log_level, fields={"role": role, "worker": name})
    sys.setswitchinterval(0.0005)  # as in an actor: loop and event loop share the interpreter
    runner = WorkerRunner(
        name, module=MODULES[role], pool=settings.pool, role=section.model_dump(mode="json"), place=place
    )
    try:
        ending = asyncio.run(_live(runner))
    except (ServiceError, ConfigError, OSError) as error:
        raise CommandError(f"{role} worker {name}: {' '.join(str(error).split())}") from error
    if ending not in ("", Ending.STOPPED):
        raise CommandError(f"{role} worker {name} ended: {ending}")


async def _live(runner: WorkerRunner) -> str:
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def stop() -> None:
        told.set()
        runner.ask_to_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    starting = asyncio.create_task(runner.start(), name="worker-start")
    waiting = asyncio.create_task(told.wait(), name="told-to-stop")
    await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not starting.done():  # a model that is being loaded is not waited for: nothing runs yet
        os._exit(0)
    await starting
    return (await runner.run()).value


def run_router(
    cluster: Cluster,
    *,
    router_id: str,
    host: str | None,
    port: int | None,
    secrets: Mapping[str, Path | None],
) -> None:
    """One router until SIGTERM, then its drain. Loads no torch.

    Args:
        secrets: Files of ``[router.tenancy]`` and ``[router]`` that a secret store mounts; None = not given.

    Raises:
        CommandError: The settings will not do, or it cannot run.
    """
    from epdserve.services.cli.router_settings import router_config
    from epdserve.services.observability.logs import setup_logging
    from epdserve.services.router.server import run

    over: dict[str, Any] = {"router_id": router_id, "host": host, "port": port, **secrets}
    config, log_level = router_config(cluster, over)
    setup_logging(level=log_level, fields={"role": "router", "router": config.router_id})
    try:
        run(config)
    except (ServiceError, FileNotFoundError, ValueError) as error:
        raise CommandError(f"router: {error}") from error


def run_pools(cluster: Cluster, *, ray_address: str, gpus: Mapping[str, float]) -> None:
    """Start the workers of all pools as actors of a Ray cluster and keep them so, until SIGTERM.

    A worker stands on a node that has one of Ray's resource ``epdserve_ROLE``, and takes its place from the node's
    environment.

    Raises:
        CommandError: Ray or a worker did not start.
    """
    from epdserve.services.observability.logs import setup_logging

    settings = cluster.settings()
    setup_logging(level=settings.machine.log_level, fields={"role": "supervisor"})
    try:
        asyncio.run(_supervise(settings, ray_address, gpus))
    except* ServiceError as errors:
        raise CommandError("; ".join(str(error) for error in errors.exceptions)) from None


async def _supervise(settings: UpSettings, ray_address: str, gpus: Mapping[str, float]) -> None:
    from epdserve.services.pool.supervisor import Supervisor, join_ray, stop_ray

    join_ray(ray_address)
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    machine = settings.machine
    supervisor = Supervisor(settings.pool, host="", log_level=machine.log_level)
    counts = {
        "prefill": machine.prefill_workers,
        "decode": machine.decode_workers,
        "encode": machine.encode_workers,
    }
    try:
        async with asyncio.TaskGroup() as group:
            for role, count in counts.items():
                if count:
                    table = getattr(settings, role).model_dump(mode="json")
                    needs = {f"epdserve_{role}": 1.0}
                    group.create_task(
                        supervisor.start(
                            role, MODULES[role], table, count, num_gpus=gpus.get(role, 0.0), resources=needs
                        )
                    )
        await told.wait()
    finally:
        await supervisor.stop_all()
        stop_ray()


def stop_worker(pid_file: Path, *, wait_s: float) -> None:
    """Tell the worker of this pod to drain and wait for its end; fine if there is none.

    Raises:
        CommandError: It still runs after ``wait_s``.
    """
    try:
        pid = int(pid_file.read_text(encoding="ascii"))
        os.kill(pid, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):
        return
    except (ValueError, OSError) as error:
        raise CommandError(f"{pid_file}: {error}") from error
    give_up_at = time.monotonic() + wait_s
    while _runs(pid) and pid_file.exists():
        if time.monotonic() > give_up_at:
            raise CommandError(f"process {pid} still runs after {wait_s:.0f} s")
        time.sleep(_STOP_POLL_S)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
