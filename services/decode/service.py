"""A decode worker's process: resumable streams in front of the step loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from epdserve.services.config import parse_config
from epdserve.services.decode.admission import Admission
from epdserve.services.decode.config import DecodeSettings
from epdserve.services.decode.ingest import Ingest
from epdserve.services.decode.peers import GrpcPeers
from epdserve.services.decode.preemption import SwapSpace
from epdserve.services.decode.pulling import PullDriver
from epdserve.services.decode.worker import DecodeWorker
from epdserve.services.engine.block_feed import BlockFeed
from epdserve.services.engine.host import EngineHost, Load
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.errors import Draining, Internal, Unavailable
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.view import ClusterView
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.rpc.decode_server import DecodeSessions
from epdserve.services.rpc.metrics import DecodeSessionsCollector
from epdserve.services.rpc.server import RpcServer, serve_decode
from epdserve.services.types import (
    BlockUpdate,
    DecodeJob,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
)

_STOP_S = 10.0
_LAST_CHUNKS_S = 1.0
_FIRST_VIEW_S = 1.0


def build(settings: Mapping[str, Any]) -> "DecodeService":
    """The service that the pool starts."""
    worker = WorkerSettings.model_validate(settings)
    return DecodeService(worker, parse_config(worker.role, DecodeSettings, source="decode"))


class DecodeService:
    """One decode worker. Created, started and stopped on one event loop, once each."""

    def __init__(self, settings: WorkerSettings, role: DecodeSettings) -> None:
        self._settings, self._role = settings, role
        self._exits = contextlib.AsyncExitStack()
        self._state = WorkerState.STARTING
        self._crashed = False

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
        self._events = asyncio.get_running_loop()
        self._host = host = await asyncio.to_thread(
            EngineHost,
            self._role.engine,
            worker=settings.worker,
            incarnation=settings.incarnation,
            role=WorkerRole.DECODE,
            host=settings.host,
        )
        exits.push_async_callback(asyncio.to_thread, host.close)
        self._transfers = TransferThread(host.transfer, clock=host.clock)
        self._transfers.start()
        exits.push_async_callback(asyncio.to_thread, self._transfers.stop, timeout_s=_STOP_S)
        driver = await self._open_driver(exits)
        self._sessions = DecodeSessions(
            worker=settings.worker, incarnation=settings.incarnation, submit=self._submit, cancel=self._cancel
        )
        DecodeSessionsCollector(self._sessions, host.registry)
        self._loop = StepLoop("decode-steps", self._step, clock=host.clock, on_crash=self._on_crash)
        self._open_worker(driver)
        self._loop.start()
        exits.push_async_callback(asyncio.to_thread, self._loop.stop, timeout_s=_STOP_S)
        exits.push_async_callback(
            driver.stop
        )  # before the loop ends: it takes the places of broken pulls back
        self._feed = BlockFeed(host.runner.blocks, settings.incarnation)
        self._feed.start()
        exits.push_async_callback(self._feed.stop)
        self._watch_metrics()
        self._server: RpcServer = await serve_decode(
            self, self._sessions, token=settings.cluster_token, address=f"{settings.host}:0"
        )
        exits.push_async_callback(self._server.stop, grace_s=1.0)

    async def _open_driver(self, exits: contextlib.AsyncExitStack) -> PullDriver:
        """Peers through a registry view of our own, and what pulls from them."""
        pool, role = self._settings.pool, self._role
        registry = Registry(
            pool.redis_url, namespace=pool.namespace, lease_s=pool.lease_s, timeout_s=pool.redis_timeout_s
        )
        exits.push_async_callback(registry.close)
        view = ClusterView(registry, lease_s=pool.lease_s, refresh_s=pool.refresh_s)
        exits.push_async_callback(view.close)
        await view.start(wait_s=_FIRST_VIEW_S)
        peers = GrpcPeers(view, token=self._settings.cluster_token)
        exits.push_async_callback(peers.close)
        return PullDriver(
            asyncio.get_running_loop(),
            self._transfers,
            peers,
            deadline_s=role.handoff_deadline_s,
            lease_call_deadline_s=role.lease_call_deadline_s,
        )

    def _open_worker(self, driver: PullDriver) -> None:
        host, engine = self._host, self._role.engine
        self._admission = Admission(
            host.runner,
            Ingest(host.runner, self._transfers, driver),
            SwapSpace(host.runner, limit_bytes=self._role.swap_memory_bytes),
            driver,
            submit=self._loop.submit,
            metrics=host.metrics,
        )
        self._limits = RequestLimits.of(host.runner, engine)
        self._worker = DecodeWorker(
            host.runner,
            self._admission,
            self._limits,
            worker=self._settings.worker,
            publish=self._sessions.publish,
            chunk_tokens=engine.chunk_tokens,
            max_queued=engine.max_queued,
            metrics=host.metrics,
        )

    async def stop(self, drain_s: float) -> None:
        """Let what runs end for up to ``drain_s``, hand the rest back to the routers, let go of everything."""
        self._state = WorkerState.DRAINING
        if not self._crashed and not await self._sessions.drained(deadline_s=drain_s):
            error = Unavailable("the worker has stopped", worker=self._settings.worker)
            ended = self._loop.call(lambda: self._worker.fail_all(error))
            async with asyncio.timeout(_STOP_S):
                await asyncio.wrap_future(ended)
            await self._sessions.drained(deadline_s=_LAST_CHUNKS_S)
        await self._exits.aclose()

    def info(self) -> WorkerInfo:
        """The facts of this moment.

        Raises:
            Internal: The step loop has crashed, so that this life must end.
        """
        if self._crashed:
            raise Internal("the step loop has crashed", worker=self._settings.worker)
        return self._host.info(
            Load(
                self._admission.queued_tokens,
                self._admission.running + self._admission.pulling,
                self._loop.step_age_s,
            ),
            address=self._server.address,
            state=self._state,
            max_context_tokens=self._limits.max_context_tokens,
        )

    async def describe(self) -> WorkerDescription:
        """Facts and the door to the pages."""
        return WorkerDescription(self.info(), self._host.endpoint)

    def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        """A snapshot of the blocks held, then what changes."""
        return self._feed.watch()

    def _step(self) -> bool:
        return self._worker.step()

    def _submit(self, job: DecodeJob) -> None:
        """A router's job; on the event loop.

        Raises:
            ServiceError: It cannot be taken; the session tells the router.
        """
        if self._state is not WorkerState.READY:
            raise Draining("this worker takes no new work", worker=self._settings.worker)
        task = self._worker.new_task(job)
        self._loop.submit(lambda: self._worker.enqueue(task))

    def _cancel(self, request_id: str) -> None:
        if not self._crashed:
            self._loop.submit(lambda: self._worker.cancel(request_id))

    def _on_crash(self, error: BaseException) -> None:
        """In the loop's thread; nothing is freed, as the books may be wrong."""
        self._crashed = True
        internal = Internal("the step loop has crashed", worker=self._settings.worker)
        self._events.call_soon_threadsafe(self._sessions.fail_all, internal)

    def _watch_metrics(self) -> None:
        worker, admission = self._worker, self._admission
        self._host.metrics.watch(
            leaked_pages=self._host.leaked_pages(lambda: worker.tasks == 0 and admission.pulling == 0),
            step_age_s=lambda: self._loop.step_age_s,
            waiting=lambda: admission.waiting,
            running=lambda: admission.running,
            oldest_waiting_s=admission.oldest_waiting_s,
            swapped_bytes=lambda: admission.swapped_bytes,
        )
