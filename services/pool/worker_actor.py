"""The Ray actor around a worker. Ray gives it a process and takes it away; the rest is ``worker_runner``.

SIGTERM drains the worker, after which ``run`` returns.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from epdserve.services.config import ConfigError
from epdserve.services.errors import ServiceError
from epdserve.services.observability.logs import setup_logging
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.place import Place
from epdserve.services.pool.termination import on_sigterm
from epdserve.services.pool.worker_runner import WorkerRunner

log = logging.getLogger(__name__)

# the step loop's thread and the event loop share the interpreter: hand it over often
SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class Launch:
    """What an actor is told; travels as JSON.

    Attributes:
        module: Of the role.
        host: Address to bind to; empty = what the environment of the node says, with the rest of the place.
        settings: The role's.
        unwanted_path: Entry that Ray puts on ``sys.path`` of its workers, the driver's folder: ours holds folders
            with the names of libraries.
    """

    worker: str
    role: str
    module: str
    host: str
    pool: dict[str, Any]
    settings: dict[str, Any]
    log_level: str = "INFO"
    unwanted_path: str = ""

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Started:
    """What an actor answers when its worker takes work; ``error`` is one line if it does not."""

    pid: int
    incarnation: str = ""
    address: str = ""
    metrics_address: str = ""
    error: str = ""


class WorkerActor:
    """One life of one worker; made an actor by the supervisor.

    Args:
        launch: A ``Launch`` as JSON.
    """

    def __init__(self, launch: str) -> None:
        self._launch = Launch(**json.loads(launch))
        sys.path[:] = [entry for entry in sys.path if entry != self._launch.unwanted_path]
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        setup_logging(
            level=self._launch.log_level, fields={"role": self._launch.role, "worker": self._launch.worker}
        )
        self._runner: WorkerRunner | None = None
        on_sigterm(self._terminate)

    async def start(self) -> str:
        """Start the worker; a ``Started`` as JSON."""
        launch = self._launch
        self._runner = WorkerRunner(
            launch.worker,
            module=launch.module,
            pool=PoolConfig.model_validate(launch.pool),
            role=launch.settings,
            place=Place(host=launch.host) if launch.host else Place.from_environment(),
        )
        try:
            info = await self._runner.start()
        except (ServiceError, ConfigError) as error:
            return json.dumps(asdict(Started(os.getpid(), error=str(error))))
        started = Started(os.getpid(), info.incarnation, info.address, info.metrics_address)
        return json.dumps(asdict(started))

    async def run(self) -> str:
        """Run until told to stop; why it ended."""
        assert self._runner is not None, "run before start"
        return (await self._runner.run()).value

    async def stop(self, drain_s: float) -> None:
        """Begin to drain; ``run`` returns when that is done."""
        if self._runner is not None:
            self._runner.ask_to_stop(drain_s)

    def _terminate(self) -> None:
        log.info("told to terminate")
        if self._runner is not None:
            self._runner.ask_to_stop()
