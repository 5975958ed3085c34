"""A prefill worker's process: the Prefill service in front of the step loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from typing import Any

from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.metrics import LeaseMetrics
from epdserve.kvstore.types import LeaseId
from epdserve.services.config import parse_config
from epdserve.services.engine.block_feed import BlockFeed
from epdserve.services.engine.host import EngineHost, Load
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.errors import DeadlineExceeded, Draining, Internal, Unavailable
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.prefill.config import PrefillSettings
from epdserve.services.prefill.task import PrefillTask
from epdserve.services.prefill.worker import PrefillWorker
from epdserve.services.rpc.server import RpcServer, serve_prefill
from epdserve.services.types import (
    BlockUpdate,
    PrefillJob,
    PrefillResult,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
)

_STOP_S = 10.0
_DRAIN_POLL_S = 0.02


def build(settings: Mapping[str, Any]) -> "PrefillService":
    """The service that the pool starts."""
    worker = WorkerSettings.model_validate(settings)
    return PrefillService(worker, parse_config(worker.role, PrefillSettings, source="prefill"))


class PrefillService:
    """One prefill worker. Created, started and stopped on one event loop, once each."""

    def __init__(self, settings: WorkerSettings, role: PrefillSettings) -> None:
        self._settings, self._role = settings, role
        self._exits = contextlib.AsyncExitStack()
        self._state = WorkerState.STARTING
        self._crashed = False
        self._tasks: dict[str, PrefillTask] = {}

    async def start(self) -> None:
        """Load, listen, take work.

        Raises:
            Unavailable: The model, the transport or an address cannot be used.
        """
        async with contextlib.AsyncExitStack() as opening:
            await self._open(opening)
            self._exits = opening.pop_all()
        self._state = WorkerState.READY

    async def _open(self, exits: contextlib.AsyncExitStack) -> None:
        settings = self._settings
        self._host = host = await asyncio.to_thread(
            EngineHost,
            self._role.engine,
            worker=settings.worker,
            incarnation=settings.incarnation,
            role=WorkerRole.PREFILL,
            host=settings.host,
        )
        exits.push_async_callback(asyncio.to_thread, host.close)
        lease_metrics = LeaseMetrics(host.registry)
        self._leases = LeaseTable(host.clock, metrics=lease_metrics)
        lease_metrics.watch(lambda: self._leases.counts().held)
        self._transfers = TransferThread(
            host.transfer, clock=host.clock, serves=lambda: self._leases.counts().held > 0
        )
        self._transfers.start()
        exits.push_async_callback(asyncio.to_thread, self._transfers.stop, timeout_s=_STOP_S)
        self._worker = PrefillWorker(
            host.runner,
            self._role.engine,
            self._leases,
            worker=settings.worker,
            incarnation=settings.incarnation,
            lease_ttl_s=self._role.lease_ttl_s,
            metrics=host.metrics,
        )
        self._loop = StepLoop("prefill-steps", self._worker.step, clock=host.clock, on_crash=self._on_crash)
        self._loop.start()
        exits.push_async_callback(asyncio.to_thread, self._loop.stop, timeout_s=_STOP_S)
        self._feed = BlockFeed(host.runner.blocks, settings.incarnation)
        self._feed.start()
        exits.push_async_callback(self._feed.stop)
        self._watch_metrics()
        self._server: RpcServer = await serve_prefill(
            self, token=settings.cluster_token, address=f"{settings.host}:0"
        )
        exits.push_async_callback(self._server.stop, grace_s=1.0)

    async def stop(self, drain_s: float) -> None:
        """Let what runs end and be pulled for up to ``drain_s``, fail the rest, let go of everything."""
        self._state = WorkerState.DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while not self._crashed and not (  # noqa: ASYNC110 - what is waited for is in another thread
                    self._worker.idle and self._leases.counts().held == 0
                ):
                    await asyncio.sleep(_DRAIN_POLL_S)
        if not self._crashed:
            ended = self._loop.call(lambda: self._worker.fail_all(Unavailable("the worker has stopped")))
            async with asyncio.timeout(_STOP_S):
                await asyncio.wrap_future(ended)
        self._leases.end_all()
        await self._exits.aclose()

    def info(self) -> WorkerInfo:
        """The facts of this moment.

        Raises:
            Internal: The step loop has crashed, so that this life must end.
        """
        if self._crashed:
            raise Internal("the step loop has crashed", worker=self._settings.worker)
        worker = self._worker
        return self._host.info(
            Load(worker.queued_tokens, worker.active, self._loop.step_age_s),
            address=self._server.address,
            state=self._state,
            max_context_tokens=worker.max_context_tokens,
        )

    async def describe(self) -> WorkerDescription:
        """Facts and the door to the pages."""
        return WorkerDescription(self.info(), self._host.endpoint)

    def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        """A snapshot of the blocks held, then what changes."""
        return self._feed.watch()

    async def run(self, job: PrefillJob, *, deadline_s: float | None) -> PrefillResult:
        """Fill KV for a prompt; a caller that goes away frees everything at once.

        Raises:
            InvalidRequest: The job cannot be done here.
            Overloaded: Too many prompts wait.
            Draining: The worker takes no new work.
            DeadlineExceeded: The caller's time is over.
        """
        if self._state is not WorkerState.READY:
            raise Draining("this worker takes no new work", worker=self._settings.worker)
        task = self._worker.new_task(job)
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
        if incarnation != self._settings.incarnation:
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
        self._loop.submit(lambda: self._worker.cancel(task))
        task.done.add_done_callback(self._take_back)

    def _take_back(self, done: Future[PrefillResult]) -> None:
        """The caller went away while its answer was made: nobody will pull, so nothing needs to be held."""
        if not done.cancelled() and done.exception() is None:
            for handle in done.result().handles:
                self._leases.end(LeaseId(handle.lease))

    def _on_crash(self, error: BaseException) -> None:
        self._crashed = True
        self._worker.abandon_all(Internal("the step loop has crashed", worker=self._settings.worker))

    def _watch_metrics(self) -> None:
        worker, leases = self._worker, self._leases
        self._host.metrics.watch(
            leaked_pages=self._host.leaked_pages(lambda: worker.idle and leases.counts().held == 0),
            step_age_s=lambda: self._loop.step_age_s,
            waiting=lambda: worker.waiting,
            running=lambda: worker.active,
            oldest_waiting_s=worker.oldest_waiting_s,
            swapped_bytes=lambda: 0.0,
        )
