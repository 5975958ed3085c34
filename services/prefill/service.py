"""A prefill worker's process: the Prefill service in front of the step loop."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.metrics import LeaseMetrics
from epdserve.kvstore.types import LeaseId, MemoryRegion
from epdserve.model.config import ModelConfig
from epdserve.model.errors import ModelError
from epdserve.services.config import parse_config
from epdserve.services.engine.image_config import ImageMode
from epdserve.services.engine.preparing import Prepared
from epdserve.services.engine.seat import Seat
from epdserve.services.engine.service import STOP_S, EngineService
from epdserve.services.errors import DeadlineExceeded, Draining, Internal, Unavailable
from epdserve.services.observability.tracing import Attributes
from epdserve.services.pool.view import open_view
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.prefill.config import PrefillSettings
from epdserve.services.prefill.images import ImageDesk, ImageMemory
from epdserve.services.prefill.task import PrefillTask
from epdserve.services.prefill.worker import PrefillWorker
from epdserve.services.rpc.encode_servicer import add_encode
from epdserve.services.rpc.server import RpcServer, serve_prefill
from epdserve.services.types import (
    PrefillJob,
    PrefillResult,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
)
from prometheus_client import CollectorRegistry

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
            settings.worker,
            settings.incarnation,
            WorkerRole.PREFILL,
            settings.host,
            settings.cluster_token,
            settings.port,
            settings.metrics_port,
        )
        super().__init__(seat, role.engine)
        self._pool, self._role = settings.pool, role
        self._tasks: dict[str, PrefillTask] = {}
        self._image_memory: ImageMemory | None = None
        self._images: ImageDesk | None = None

    # -- calls ----------------------------------------------------------------------------------------------

    async def run(self, job: PrefillJob, *, deadline_s: float | None) -> PrefillResult:
        """Fill KV for a prompt; a caller that goes away frees everything at once.

        Raises:
            InvalidRequest: The job cannot be done here.
            Overloaded: Too many prompts wait.
            Draining: The worker takes no new work.
            DeadlineExceeded: The caller's time is over.
        """
        began = perf_counter()
        attributes: dict[str, str | int | float | bool] = {
            "epdserve.request_id": job.request_id,
            "epdserve.outcome": "failed",
        }
        try:
            result = await self._run(job, deadline_s)
            attributes |= {
                "epdserve.outcome": "ok",
                "epdserve.cached_tokens": result.cached_tokens,
                "epdserve.computed_tokens": result.computed_tokens,
                "epdserve.queue_ms": result.queue_ms,
            }
            return result
        finally:
            self._tracing.record(
                "prefill", parent=job.trace, began=began, ended=perf_counter(), attributes=attributes
            )

    async def _run(self, job: PrefillJob, deadline_s: float | None) -> PrefillResult:
        if self._state is not WorkerState.READY:
            raise Draining("this worker takes no new work", worker=self._seat.worker)
        task = self._worker.new_task(job)
        task.ready = not self._desk.prepare(task.request, self._when_prepared(task, job.trace))
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

    def _when_prepared(self, task: PrefillTask, trace: str) -> Callable[[Prepared], None]:
        """Let a task start; with a trace, tell how long the store took and what it gave."""
        if not self._tracing.on or not trace:
            return partial(self._worker.prepared, task)
        began = perf_counter()

        def prepared(found: Prepared) -> None:
            tiers = Counter(tier.value for tier in found.tiers.values())
            told: Attributes = {
                "epdserve.request_id": task.request.request_id,
                "epdserve.tail": found.tail is not None,
                **{f"epdserve.{tier}_blocks": count for tier, count in tiers.items()},
            }
            self._tracing.record("bring up", parent=trace, began=began, ended=perf_counter(), attributes=told)
            self._worker.prepared(task, found)

        return prepared

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
        task.unwanted = True  # from here on also in the middle of a step
        task.done.add_done_callback(self._take_back)

    def _take_back(self, done: Future[PrefillResult]) -> None:
        """The caller went away while its answer was made: nobody will pull, so nothing needs to be held."""
        if not done.cancelled() and done.exception() is None:
            for handle in done.result().handles:
                self._leases.end(LeaseId(handle.lease))

    # -- life -----------------------------------------------------------------------------------------------

    def info(self) -> WorkerInfo:
        """See ``EngineService.info``."""
        encodes = self._images is not None and self._images.encoding is not None
        return replace(super().info(), encodes=encodes)

    def _own_memory(self, registry: CollectorRegistry) -> Sequence[MemoryRegion]:
        if self._role.images.mode is ImageMode.OFF:
            return ()
        try:
            config = ModelConfig.from_directory(self._role.engine.model_dir)
        except ModelError as error:
            raise Unavailable(f"model {self._role.engine.model_dir}: {error}") from error
        if config.vision is None:
            return ()
        self._image_memory = ImageMemory(self._role, config, SystemClock(), registry)
        return (self._image_memory.region,)

    async def _open_cluster(self, exits: contextlib.AsyncExitStack) -> Callable[[], WorkerInfo | None]:
        self._view = view = await exits.enter_async_context(open_view(self._pool, wait_s=_FIRST_VIEW_S))
        return lambda: view.store_of(self._pool.machine_name)

    async def _open_worker(self, exits: contextlib.AsyncExitStack) -> PrefillWorker:
        host, lease_metrics = self._host, LeaseMetrics(self._host.registry)
        self._leases = leases = LeaseTable(host.clock, metrics=lease_metrics)
        lease_metrics.watch(lambda: leases.counts().held)
        if self._image_memory is not None:
            self._images = self._open_images(self._image_memory)
        worker = PrefillWorker(
            host.runner,
            self._role.engine,
            leases,
            worker=self._seat.worker,
            incarnation=self._seat.incarnation,
            lease_ttl_s=self._role.lease_ttl_s,
            offloader=self._desk.offloader,
            speeds=self._desk.speeds,
            images=self._images,
            metrics=host.metrics,
        )
        if self._images is not None:
            self._images.start(worker, exits)
        return worker

    def _open_images(self, memory: ImageMemory) -> ImageDesk:
        if memory.parts is None:  # a cache is not something held
            self._host.slot_metrics.watch("embeddings", memory.pool.counts)
        return ImageDesk(
            memory,
            self._transfers,
            self._loop,
            self._leases,
            self._view.get,
            lambda: WorkerDescription(self.info(), self._host.endpoint),
            seat=self._seat,
            clock=self._host.clock,
            registry=self._host.registry,
            tracing=self._tracing,
        )

    def _is_read(self) -> bool:
        return self._leases.counts().held > 0

    async def _serve(self) -> RpcServer:
        seat = self._seat
        images = self._images
        beside = partial(add_encode, images) if images is not None and images.encoding is not None else None
        return await serve_prefill(
            self, token=seat.cluster_token, address=f"{seat.host}:{seat.port}", beside=beside
        )

    async def _drain(self, drain_s: float) -> None:
        """Let what runs end and be pulled, then fail the rest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while not self._crashed and not (  # noqa: ASYNC110 - what is waited for is in another thread
                    self._worker.idle and self._leases.counts().held == 0
                ):
                    await asyncio.sleep(_DRAIN_POLL_S)
        if not self._crashed:
            error = Draining("the worker has stopped: another one can do it", worker=self._seat.worker)
            ended = self._loop.call(lambda: self._worker.fail_all(error))
            async with asyncio.timeout(STOP_S):
                await asyncio.wrap_future(ended)
        self._leases.end_all()

    def _tell_crash(self, error: Internal) -> None:
        self._worker.abandon_all(error)
