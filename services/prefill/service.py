"""A prefill worker's process: the Prefill service in front of the step loop."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.metrics import LeaseMetrics
from epdserve.kvstore.types import LeaseId
from epdserve.services.config import parse_config
from epdserve.services.engine.seat import Seat
from epdserve.services.engine.service import STOP_S, EngineService
from epdserve.services.errors import DeadlineExceeded, Draining, Internal, Unavailable
from epdserve.services.pool.view import open_view
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.prefill.config import PrefillSettings
from epdserve.services.prefill.task import PrefillTask
from epdserve.services.prefill.worker import PrefillWorker
from epdserve.services.rpc.server import RpcServer, serve_prefill
from epdserve.services.types import PrefillJob, PrefillResult, WorkerInfo, WorkerRole, WorkerState

_DRAIN_POLL_S = 0.02
_FIRST_VIEW_S = 1.0


def build(settings: Mapping[str, Any]) -> "PrefillService":
    """The service that the pool starts."""
    worker = WorkerSettings.model_validate(settings)
    return PrefillService(worker, parse_config(worker.role, PrefillSettings, source="prefill"))


class PrefillService(EngineService):
    """One prefill worker."""

    _worker: PrefillWorker

    def __init__(self, settings: WorkerSettings, role: PrefillSettings) -> None:
        seat = Seat(
            settings.worker, settings.incarnation, WorkerRole.PREFILL, settings.host, settings.cluster_token
        )
        super().__init__(seat, role.engine)
        self._pool, self._role = settings.pool, role
        self._tasks: dict[str, PrefillTask] = {}

    # -- calls ----------------------------------------------------------------------------------------------

    async def run(self, job: PrefillJob, *, deadline_s: float | None) -> PrefillResult:
        """Fill KV for a prompt; a caller that goes away frees everything at once.

        Raises:
            InvalidRequest: The job cannot be done here.
            Overloaded: Too many prompts wait.
            Draining: The worker takes no new work.
            DeadlineExceeded: The caller's time is over.
        """
        if self._state is not WorkerState.READY:
            raise Draining("this worker takes no new work", worker=self._seat.worker)
        task = self._worker.new_task(job)
        task.ready = not self._desk.prepare(task.request, partial(self._worker.prepared, task))
        self._loop.submit(lambda: self._worker.enqueue(task), lambda error: task.done.set_exception(error))
        self._tasks[job.request_id] = task
        try:
            async with asyncio.timeout(deadline_s):
                result = await asyncio.wrap_future(task.done)
        except (asyncio.CancelledError, TimeoutError) as error:
            self._undo(task)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"no prefill within {deadline_s} s") from None
            raise
        finally:
            self._tasks.pop(job.request_id, None)
        self._transfers.wake()
        return result

    async def release_lease(self, lease: str, *, incarnation: str) -> bool:
        """End a lease; one of another incarnation never holds."""
        if incarnation != self._seat.incarnation:
            return False
        held = self._leases.end(LeaseId(lease))
        self._loop.wake()  # a prompt may wait for these pages
        return held

    async def abandon(self, request_id: str) -> None:
        """Undo a job whose caller has given up, even if its answer has left and was never taken."""
        if (task := self._tasks.get(request_id)) is not None:
            self._undo(task)
        elif leases := self._worker.leases_of(request_id):
            for lease in leases:
                self._leases.end(lease)
            self._loop.wake()

    def _undo(self, task: PrefillTask) -> None:
        self._desk.cancel(task.request)
        self._loop.submit(lambda: self._worker.cancel(task))
        task.done.add_done_callback(self._take_back)

    def _take_back(self, done: Future[PrefillResult]) -> None:
        """The caller went away while its answer was made: nobody will pull, so nothing needs to be held."""
        if not done.cancelled() and done.exception() is None:
            for handle in done.result().handles:
                self._leases.end(LeaseId(handle.lease))

    # -- life -----------------------------------------------------------------------------------------------

    async def _open_cluster(self, exits: contextlib.AsyncExitStack) -> Callable[[], WorkerInfo | None]:
        view = await exits.enter_async_context(open_view(self._pool, wait_s=_FIRST_VIEW_S))
        return lambda: view.store_of(self._pool.machine_name)

    async def _open_worker(self, exits: contextlib.AsyncExitStack) -> PrefillWorker:
        host, lease_metrics = self._host, LeaseMetrics(self._host.registry)
        self._leases = leases = LeaseTable(host.clock, metrics=lease_metrics)
        lease_metrics.watch(lambda: leases.counts().held)
        return PrefillWorker(
            host.runner,
            self._role.engine,
            leases,
            worker=self._seat.worker,
            incarnation=self._seat.incarnation,
            lease_ttl_s=self._role.lease_ttl_s,
            offloader=self._desk.offloader,
            speeds=self._desk.speeds,
            metrics=host.metrics,
        )

    def _is_read(self) -> bool:
        return self._leases.counts().held > 0

    async def _serve(self) -> RpcServer:
        seat = self._seat
        return await serve_prefill(self, token=seat.cluster_token, address=f"{seat.host}:0")

    async def _drain(self, drain_s: float) -> None:
        """Let what runs end and be pulled, then fail the rest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while not self._crashed and not (  # noqa: ASYNC110 - what is waited for is in another thread
                    self._worker.idle and self._leases.counts().held == 0
                ):
                    await asyncio.sleep(_DRAIN_POLL_S)
        if not self._crashed:
            ended = self._loop.call(lambda: self._worker.fail_all(Unavailable("the worker has stopped")))
            async with asyncio.timeout(STOP_S):
                await asyncio.wrap_future(ended)
        self._leases.end_all()

    def _tell_crash(self, error: Internal) -> None:
        self._worker.abandon_all(error)
