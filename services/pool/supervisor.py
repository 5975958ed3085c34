"""Starts the workers of an installation as Ray actors and starts dead ones again.

Each worker has one task here that waits for its actor to end, however it ends, and then makes the next life of it,
after a pause that grows with deaths in a row. Workers live as long as the supervisor's process: nothing is left
behind. It never sees a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from epdserve.services.errors import Unavailable
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.termination import SETUP_HOOK
from epdserve.services.pool.worker_actor import Launch, Started, WorkerActor
from epdserve.services.pool.worker_runner import Ending

# Read when ray is imported. Ray exchanges a loopback address for one that other machines can reach, and listens on
# all of them; this is its switch for machines that are no part of a cluster.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
from ray.exceptions import RayError

log = logging.getLogger(__name__)

# one thread of arithmetic a worker, and none that spins while it waits; our folders must not shadow libraries
DEFAULT_ENV: Final[Mapping[str, str]] = {
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# a life longer than this ended for a new reason: the next one begins without a pause
STEADY_S: Final = 30.0
_CALL_S: Final = 10.0


def start_ray(
    *, num_cpus: int = 1, namespace: str = "epdserve", node_ip: str = "127.0.0.1", log_to_driver: bool = True
) -> None:
    """Start a Ray of this process alone, on loopback unless told otherwise; takes seconds, blocks.

    For another ``node_ip``, ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1`` must stand in the environment.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs workers at nice 15: whatever else the machine does would then come before every token.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        num_cpus=num_cpus,
        namespace=namespace,
        include_dashboard=False,
        log_to_driver=log_to_driver,
        _node_ip_address=node_ip,
        runtime_env={"env_vars": dict(DEFAULT_ENV), "worker_process_setup_hook": SETUP_HOOK},
    )


def join_ray(address: str, *, namespace: str = "epdserve") -> None:
    """Join the Ray that runs on this node, of which the workers' nodes are members; blocks.

    Raises:
        Unavailable: There is none at this address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env = {"env_vars": dict(DEFAULT_ENV), "worker_process_setup_hook": SETUP_HOOK}
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, runtime_env=env)
    except (RayError, ConnectionError, ValueError) as error:
        raise Unavailable(f"no Ray at {address}: {_one_line(error)}") from error


def stop_ray() -> None:
    """End Ray with all that runs in it."""
    ray.shutdown()


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as its supervisor sees it.

    Attributes:
        running: Whether it has started and not ended.
        pid: Of its process, 0 while there is none.
        lives: How many there have been.
    """

    worker: str
    role: str
    running: bool
    pid: int
    incarnation: str
    address: str
    metrics_address: str
    lives: int


@dataclass(slots=True, eq=False)
class _Slot:
    launch: Launch
    env: dict[str, str]
    needs: dict[str, Any]
    actor: Any = None
    started: Started | None = None
    lives: int = 0
    ending: bool = False
    task: asyncio.Task[None] | None = None


class Supervisor:
    """All workers started here. Owned by one event loop; Ray must have been started.

    Args:
        pool: Handed to every worker.
        host: Address that workers bind to; empty = what the environment of their node says (``Place``).
        log_level: Of the workers.
    """

    def __init__(self, pool: PoolConfig, *, host: str = "127.0.0.1", log_level: str = "INFO") -> None:
        self._pool, self._host, self._log_level = pool, host, log_level
        self._slots: dict[str, _Slot] = {}

    async def start(
        self,
        role: str,
        module: str,
        settings: Mapping[str, Any],
        count: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        num_cpus: float = 0.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
    ) -> list[WorkerStatus]:
        """Start ``count`` more workers of a role; returns when all of them take work.

        Args:
            role: Workers are named ``ROLE-0`` and so on.
            module: Where the role's ``build`` is.
            settings: The role's, JSON values only.
            count: How many.
            env: Environment variables beyond ``DEFAULT_ENV``.
            num_cpus: What Ray sets aside for each.
            num_gpus: Likewise.
            resources: Likewise, of Ray's own kinds; they say on which nodes the workers may stand.

        Raises:
            Unavailable: One of them did not start; the message says why, and those that did were stopped.
        """
        first = sum(slot.launch.role == role for slot in self._slots.values())
        slots = []
        for index in range(first, first + count):
            launch = Launch(
                worker=f"{role}-{index}",
                role=role,
                module=module,
                host=self._host,
                pool=self._pool.model_dump(mode="json"),
                settings=dict(settings),
                log_level=self._log_level,
                unwanted_path=_unwanted_path(),
            )
            needs = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": dict(resources or {})}
            slots.append(_Slot(launch, {**DEFAULT_ENV, **(env or {})}, needs))
        self._slots.update({slot.launch.worker: slot for slot in slots})
        answers = await asyncio.gather(*(self._begin_and_keep(slot) for slot in slots))
        failed = [
            f"{slot.launch.worker}: {error}" for slot, error in zip(slots, answers, strict=True) if error
        ]
        if failed:
            await asyncio.gather(*(self._end(slot, drain_s=0.0) for slot in slots))
            for slot in slots:
                del self._slots[slot.launch.worker]
            raise Unavailable("; ".join(failed))
        return [self._status(slot) for slot in slots]

    def workers(self) -> list[WorkerStatus]:
        """All workers, by name."""
        return [self._status(self._slots[name]) for name in sorted(self._slots)]

    async def kill(self, worker: str) -> None:
        """End a worker's process without warning; another life of it follows.

        Raises:
            KeyError: There is no such worker.
        """
        actor = self._slots[worker].actor
        if actor is not None:
            ray.kill(actor)

    async def stop_all(self, drain_s: float | None = None) -> None:
        """Drain all workers at once and end them; the pool's ``drain_timeout_s`` if None."""
        drain_s = self._pool.drain_timeout_s if drain_s is None else drain_s
        await asyncio.gather(*(self._end(slot, drain_s=drain_s) for slot in self._slots.values()))
        self._slots.clear()

    async def _begin_and_keep(self, slot: _Slot) -> str:
        """Start a worker; from then on its heartbeats run, however long the others take to start."""
        error = await self._begin(slot)
        if not error:
            slot.task = asyncio.create_task(self._keep(slot), name=f"keep {slot.launch.worker}")
        return error

    async def _begin(self, slot: _Slot) -> str:
        """One life, up to taking work; what went wrong, in one line, or nothing."""
        slot.lives += 1
        slot.started = None
        try:
            options = {"max_concurrency": 16, "runtime_env": {"env_vars": slot.env}, **slot.needs}
            slot.actor = ray.remote(WorkerActor).options(**options).remote(slot.launch.to_json())
            async with asyncio.timeout(self._pool.start_timeout_s):
                started = Started(**json.loads(await slot.actor.start.remote()))
        except RayError as error:
            return _one_line(error)
        except TimeoutError:
            return f"not started within {self._pool.start_timeout_s} s"
        if not started.error:
            slot.started = started
        return started.error

    async def _keep(self, slot: _Slot) -> None:
        """Wait for the end of each life and begin the next."""
        worker, backoff_s = slot.launch.worker, self._pool.restart_backoff_s
        while True:
            began = time.monotonic()
            if slot.started is not None:
                try:
                    reason = await slot.actor.run.remote()
                except RayError as error:
                    reason = _one_line(error)
            slot.started = None
            if slot.ending:
                return
            self._discard(slot)
            if time.monotonic() - began >= STEADY_S or reason == Ending.STOPPED:
                backoff_s = self._pool.restart_backoff_s
            log.warning("worker ended, starting again", extra={"worker": worker, "reason": reason})
            if reason != Ending.STOPPED:  # who was told to stop and drained has no fault to wait for
                await asyncio.sleep(backoff_s)
                backoff_s = min(max(2 * backoff_s, 0.1), self._pool.restart_backoff_max_s)
            reason = await self._begin(slot)

    async def _end(self, slot: _Slot, *, drain_s: float) -> None:
        slot.ending = True
        try:
            if slot.started is not None and slot.task is not None:
                async with asyncio.timeout(_CALL_S):
                    await slot.actor.stop.remote(drain_s)
                # the service has its own patience of 10 s beyond the drain
                await asyncio.wait([slot.task], timeout=drain_s + 15.0)
        except (RayError, TimeoutError) as error:
            log.warning(
                "worker did not stop", extra={"worker": slot.launch.worker, "reason": _one_line(error)}
            )
        finally:
            if slot.task is not None:
                slot.task.cancel()
                await asyncio.wait([slot.task], timeout=5.0)
            self._discard(slot)

    def _discard(self, slot: _Slot) -> None:
        """Make sure that a life is over."""
        if slot.actor is not None:
            with contextlib.suppress(RayError):
                ray.kill(slot.actor)
        slot.actor, slot.started = None, None

    def _status(self, slot: _Slot) -> WorkerStatus:
        started = slot.started or Started(0)
        return WorkerStatus(
            slot.launch.worker,
            slot.launch.role,
            slot.started is not None,
            started.pid,
            started.incarnation,
            started.address,
            started.metrics_address,
            slot.lives,
        )


def _unwanted_path() -> str:
    """The folder that Ray will put on its workers' path although it is not on ours."""
    here = os.path.abspath(os.curdir)
    return "" if here in sys.path else here


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    # Ray puts a traceback first and the error itself last
    return (text[-1] if text else type(error).__name__)[:300]
