"""The life of one worker in its process: claim an incarnation, start the service, tell the registry, drain, end.

Knows nothing of Ray; the actor shell is around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from dataclasses import replace
from enum import StrEnum
from typing import Any

from epdserve.services.errors import ServiceError, Unavailable
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.place import Place
from epdserve.services.pool.probe import ProbeServer
from epdserve.services.pool.registry import Heard, Registry, local_incarnation
from epdserve.services.pool.worker_service import WorkerService, WorkerSettings, build_service
from epdserve.services.rpc.auth import read_token
from epdserve.services.types import WorkerInfo, WorkerState

log = logging.getLogger(__name__)

HUNG_S = 120.0  # beyond the longest step, and the longest pause of the event loop
STOP_PATIENCE_S = 10.0  # a service may take this much longer than its drain


class Ending(StrEnum):
    """Why a life ended."""

    STOPPED = "stopped"
    FENCED = "fenced"
    CRASHED = "crashed"


class WorkerRunner:
    """One life of one worker. Owned by one event loop; ``ask_to_stop`` may be called from any thread.

    Args:
        worker: Name of the worker.
        module: Of the role.
        pool: The pool's settings.
        role: The role's settings.
        host: Address to bind to, where no place is given.
        place: Where this worker stands.
    """

    def __init__(
        self,
        worker: str,
        *,
        module: str,
        pool: PoolConfig,
        role: dict[str, Any],
        host: str = "127.0.0.1",
        place: Place | None = None,
    ) -> None:
        self.worker = worker
        self.incarnation = ""
        self._place = place or Place(host=host)
        if self._place.machine:
            pool = pool.model_copy(update={"machine": self._place.machine})
        self._module, self._pool, self._role = module, pool, role
        self._registry = Registry(
            pool.redis_url,
            namespace=pool.namespace,
            lease_s=pool.lease_s,
            timeout_s=pool.redis_timeout_s,
        )
        self._service: WorkerService | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._drain_s = pool.drain_timeout_s
        self._draining = False
        self._told_to_drain = False
        self._registry_away = False
        self._probes = ProbeServer(self._not_live, self._not_ready)
        self._beat_at: float | None = None
        self._step_age_s = 0.0

    def info(self) -> WorkerInfo:
        """The facts of this moment."""
        assert self._service is not None, "info before start"
        info = replace(self._service.info(), machine=self._pool.machine_name)
        return replace(info, state=WorkerState.DRAINING) if self._draining or self._told_to_drain else info

    async def start(self) -> WorkerInfo:
        """Start the service and tell the registry.

        Raises:
            ServiceError, ConfigError: What the service or the token file raised; nothing is left behind.
        """
        self._loop = asyncio.get_running_loop()
        try:
            await self._take_place()
            self._service = await self._start_service()
        except BaseException:
            await self._leave_place()
            await self._registry.close()
            raise
        log.info("worker started", extra={"worker": self.worker, "incarnation": self.incarnation})
        await self._heartbeat()
        return self.info()

    async def _start_service(self) -> WorkerService:
        token = read_token(self._pool.cluster_token_file)
        try:
            self.incarnation = await self._registry.claim(self.worker)
        except Unavailable:
            # the registry being away is no reason not to start; a clock is good enough to be the later life
            self.incarnation = local_incarnation()
        settings = WorkerSettings(
            worker=self.worker,
            incarnation=self.incarnation,
            cluster_token=token,
            host=self._place.host,
            port=self._place.port,
            metrics_port=self._place.metrics_port,
            pool=self._pool,
            role=self._role,
        )
        service = build_service(self._module, settings)
        await service.start()
        return service

    async def run(self) -> Ending:
        """Heartbeats until asked to stop, fenced off or broken; then drain and leave the registry."""
        ending = Ending.STOPPED
        while not self._asked.is_set():
            try:
                accepted = await self._heartbeat()
            except ServiceError as error:
                log.error("worker broke", extra={"worker": self.worker, "reason": str(error)})
                ending = Ending.CRASHED
                break
            if not accepted:
                ending = Ending.FENCED  # nobody comes here any more
                break
            await self._pause()
        await self._end(ending)
        log.info("worker ended", extra={"worker": self.worker, "ending": ending.value})
        return ending

    def ask_to_stop(self, drain_s: float | None = None) -> None:
        """Begin to drain; thread-safe.

        Args:
            drain_s: For what runs; the pool's ``drain_timeout_s`` if None.
        """
        if drain_s is not None:
            self._drain_s = drain_s
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._asked.set)

    async def _end(self, ending: Ending) -> None:
        assert self._service is not None
        self._draining = True
        drain_s = self._drain_s if ending is Ending.STOPPED else 0.0
        stopping = asyncio.create_task(self._service.stop(drain_s), name="worker-stop")
        give_up_at = asyncio.get_running_loop().time() + drain_s + STOP_PATIENCE_S
        while not stopping.done() and asyncio.get_running_loop().time() < give_up_at:
            if ending is Ending.STOPPED:
                await self._last_heartbeat()  # routers see DRAINING and go elsewhere
            await asyncio.wait([stopping], timeout=self._pool.heartbeat_s)
        stopping.cancel()
        with contextlib.suppress(Unavailable):
            await self._registry.withdraw(self.worker, self.incarnation)
        await self._registry.close()
        await self._leave_place()
        if stopping.done() and not stopping.cancelled() and (error := stopping.exception()) is not None:
            log.error("worker did not stop cleanly", exc_info=error, extra={"worker": self.worker})

    async def _last_heartbeat(self) -> None:
        # a service that is closing may have no facts left to tell
        with contextlib.suppress(ServiceError):
            await self._heartbeat()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pool.heartbeat_s):
                await self._asked.wait()

    async def _heartbeat(self) -> bool:
        """Tell the registry; False if it says that a later life has our name.

        Raises:
            ServiceError: The service says that it is broken.
        """
        info = self.info()
        self._beat_at, self._step_age_s = asyncio.get_running_loop().time(), info.step_age_s
        try:
            heard = await self._registry.publish(info)
            if heard and (heard is Heard.DRAIN) is not self._told_to_drain:
                self._told_to_drain = heard is Heard.DRAIN
                log.info(
                    "told by an administrator", extra={"worker": self.worker, "drain": self._told_to_drain}
                )
                heard = await self._registry.publish(self.info())
        except Unavailable as error:
            if not self._registry_away:
                log.warning("registry away", extra={"worker": self.worker, "reason": str(error)})
            self._registry_away = True
            return True
        self._registry_away = False
        if not heard:
            log.warning("fenced off by a later life", extra={"worker": self.worker})
        return bool(heard)

    # -- what an orchestrator sees ----------------------------------------------------------------------------

    async def _take_place(self) -> None:
        """Answer probes, and say who this process is, before the model is loaded: that may take minutes."""
        place = self._place
        if place.probe_port is not None:
            await self._probes.start(place.host, place.probe_port)
        if place.pid_file is not None:
            try:
                place.pid_file.write_text(f"{os.getpid()}\n", encoding="ascii")
            except OSError as error:
                raise Unavailable(f"cannot write {place.pid_file}: {error.strerror}") from error

    async def _leave_place(self) -> None:
        await self._probes.stop()
        if self._place.pid_file is not None:
            self._place.pid_file.unlink(missing_ok=True)

    def _not_live(self) -> str:
        if self._step_age_s > HUNG_S:
            return f"a step has run for {self._step_age_s:.0f} s"
        if self._beat_at is not None and asyncio.get_running_loop().time() - self._beat_at > HUNG_S:
            return "no heartbeat was tried for long"
        return ""

    def _not_ready(self) -> str:
        if self._beat_at is None:
            return "starting"
        return "draining" if self._draining or self._asked.is_set() else ""
