"""A decode worker's process: resumable streams in front of the step loop."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from epdserve.services.config import parse_config
from epdserve.services.decode.admission import Admission
from epdserve.services.decode.config import DecodeSettings
from epdserve.services.decode.grammar import Constraints
from epdserve.services.decode.grammar_metrics import GrammarCollector
from epdserve.services.decode.ingest import Ingest
from epdserve.services.decode.peers import GrpcPeers
from epdserve.services.decode.preemption import SwapSpace
from epdserve.services.decode.pulling import PullDriver
from epdserve.services.decode.task import DecodeTask
from epdserve.services.decode.traces import TracedJobs
from epdserve.services.decode.worker import DecodeWorker
from epdserve.services.engine.seat import Seat
from epdserve.services.engine.service import STOP_S, EngineService
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.errors import Draining, Internal
from epdserve.services.pool.view import open_view
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.rpc.decode_server import DecodeSessions
from epdserve.services.rpc.metrics import DecodeSessionsCollector
from epdserve.services.rpc.server import RpcServer, serve_decode
from epdserve.services.types import DecodeJob, WorkerInfo, WorkerRole, WorkerState

_LAST_CHUNKS_S = 1.0
_FIRST_VIEW_S = 1.0


def build(settings: Mapping[str, Any]) -> "DecodeService":
    """The service that the pool starts."""
    worker = WorkerSettings.model_validate(settings)
    return DecodeService(worker, parse_config(worker.role, DecodeSettings, source="decode"))


class DecodeService(EngineService):
    """One decode worker."""

    _worker: DecodeWorker

    def __init__(self, settings: WorkerSettings, role: DecodeSettings) -> None:
        seat = Seat(
            settings.worker,
            settings.incarnation,
            WorkerRole.DECODE,
            settings.host,
            settings.cluster_token,
            settings.port,
            settings.metrics_port,
        )
        super().__init__(seat, role.engine)
        self._pool, self._role = settings.pool, role

    # -- jobs, from the sessions ----------------------------------------------------------------------------

    def _submit(self, job: DecodeJob) -> None:
        """A router's job; on the event loop.

        Raises:
            ServiceError: It cannot be taken; the session tells the router.
        """
        if self._state is not WorkerState.READY:
            raise Draining("this worker takes no new work", worker=self._seat.worker)
        task = self._worker.new_task(job)
        self._traced.began(job)
        self._loop.submit(lambda: self._worker.enqueue(task))

    def _cancel(self, request_id: str) -> None:
        self._traced.cancelled(request_id)
        if not self._crashed:
            self._loop.submit(lambda: self._worker.cancel(request_id))

    # -- life -----------------------------------------------------------------------------------------------

    async def _open_cluster(self, exits: contextlib.AsyncExitStack) -> Callable[[], WorkerInfo | None]:
        """Peers through a registry view of our own, and what pulls from them."""
        view = await exits.enter_async_context(open_view(self._pool, wait_s=_FIRST_VIEW_S))
        peers = GrpcPeers(view, token=self._seat.cluster_token)
        exits.push_async_callback(peers.close)
        self._driver = PullDriver(
            asyncio.get_running_loop(),
            self._transfers,
            peers,
            deadline_s=self._role.handoff_deadline_s,
            lease_call_deadline_s=self._role.lease_call_deadline_s,
        )
        return lambda: view.store_of(self._pool.machine_name)

    async def _open_worker(self, exits: contextlib.AsyncExitStack) -> DecodeWorker:
        host, engine = self._host, self._role.engine
        exits.push_async_callback(self._driver.stop)  # the loop takes the places of broken pulls back
        self._events = asyncio.get_running_loop()
        self._sessions = DecodeSessions(
            worker=self._seat.worker,
            incarnation=self._seat.incarnation,
            submit=self._submit,
            cancel=self._cancel,
        )
        self._traced = TracedJobs(self._tracing, self._sessions.publish)
        DecodeSessionsCollector(self._sessions, host.registry)
        self._admission = Admission(
            host.runner,
            Ingest(host.runner, self._transfers, self._driver),
            SwapSpace(host.runner, limit_bytes=self._role.swap_memory_bytes),
            self._driver,
            submit=self._loop.submit,
            prepare=self._prepare,
            stop_preparing=lambda task: self._desk.cancel(task.request),
            offloader=self._desk.offloader,
            metrics=host.metrics,
        )
        constraints = Constraints.of_model(
            engine.model_dir,
            vocab_size=host.runner.backbone.config.text.vocab_size,
            eos_token_id=host.runner.backbone.config.eos_token_id,
            clock=host.clock,
            wake=self._loop.wake,
        )
        exits.callback(constraints.close)
        GrammarCollector(constraints, host.registry)
        return DecodeWorker(
            host.runner,
            self._admission,
            RequestLimits.of(host.runner, engine),
            worker=self._seat.worker,
            publish=self._traced.publish,
            chunk_tokens=engine.chunk_tokens,
            max_queued=engine.max_queued,
            offloader=self._desk.offloader,
            constraints=constraints,
            metrics=host.metrics,
        )

    def _prepare(self, task: DecodeTask) -> bool:
        return self._desk.prepare(task.request, lambda prepared: self._admission.prepared(task, prepared))

    async def _serve(self) -> RpcServer:
        seat = self._seat
        return await serve_decode(
            self, self._sessions, token=seat.cluster_token, address=f"{seat.host}:{seat.port}"
        )

    async def _drain(self, drain_s: float) -> None:
        """Let what runs end, hand the rest back to the routers."""
        if await self._sessions.drained(deadline_s=drain_s):
            return
        error = Draining("the worker has stopped: another one goes on", worker=self._seat.worker)
        ended = self._loop.call(lambda: self._worker.fail_all(error))
        async with asyncio.timeout(STOP_S):
            await asyncio.wrap_future(ended)
        await self._sessions.drained(deadline_s=_LAST_CHUNKS_S)

    def _tell_crash(self, error: Internal) -> None:
        self._events.call_soon_threadsafe(self._sessions.fail_all, error)
