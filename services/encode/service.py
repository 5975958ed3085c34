"""An encode worker's process: the Encode service in front of a vision encoder and its cache."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Mapping
from typing import Any, Final

import torch
from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import TransferUnavailable
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.metrics import LeaseMetrics, TransferMetrics
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import LeaseId
from epdserve.services.config import parse_config
from epdserve.services.encode.config import EncodeSettings
from epdserve.services.engine.endpoint import to_wire
from epdserve.services.engine.image_encoding import ImageEncoding
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.engine.vision_parts import VisionParts
from epdserve.services.errors import Draining, Unavailable
from epdserve.services.image_types import EmbeddingWish, EncodeJob, EncodeResult, LentEmbeddings
from epdserve.services.observability.metrics import MetricsServer, new_registry
from epdserve.services.observability.tracing import tracing_from_environment
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.rpc.encode_servicer import serve_encode
from epdserve.services.types import WIRE_VERSION, WorkerDescription, WorkerInfo, WorkerRole, WorkerState

_STOP_S: Final = 10.0
_POLL_S: Final = 0.02
_EXPIRE_S: Final = 0.5


def build(settings: Mapping[str, Any]) -> EncodeService:
    """The service that the pool starts."""
    worker = WorkerSettings.model_validate(settings)
    return EncodeService(worker, parse_config(worker.role, EncodeSettings, source="encode"))


class EncodeService:
    """One encode worker. Created, started and stopped on one event loop, once each."""

    def __init__(self, settings: WorkerSettings, role: EncodeSettings) -> None:
        self._settings, self._role = settings, role
        self._exits = contextlib.AsyncExitStack()
        self._state = WorkerState.STARTING
        self._clock: Clock = SystemClock()
        self._registry = new_registry()
        self._tracing = tracing_from_environment("epdserve-encode", settings.worker)

    # -- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load, listen, take work.

        Raises:
            Unavailable: The model, the memory, the transport or an address cannot be used.
        """
        async with contextlib.AsyncExitStack() as opening:
            await self._open(opening)
            self._exits = opening.pop_all()
        self._state = WorkerState.READY

    async def stop(self, drain_s: float) -> None:
        """Take no new work, let readers end their leases for up to ``drain_s``, let go of everything."""
        self._state = WorkerState.DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._encoding.making or self._leases.counts().held:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        self._leases.end_all()
        await self._exits.aclose()
        await asyncio.to_thread(self._tracing.close)

    async def _open(self, exits: contextlib.AsyncExitStack) -> None:
        settings, role = self._settings, self._role
        torch.set_num_threads(role.threads)
        self._parts = parts = await asyncio.to_thread(
            VisionParts.load, role.model_dir, role, self._clock, self._registry, device=role.device
        )
        lease_metrics = LeaseMetrics(self._registry)
        self._leases = leases = LeaseTable(self._clock, metrics=lease_metrics)
        lease_metrics.watch(lambda: leases.counts().held)
        await self._open_transfer(exits)
        self._encoding = ImageEncoding(
            parts.encoder,
            parts.store,
            role,
            leases,
            worker=settings.worker,
            incarnation=settings.incarnation,
            clock=self._clock,
            metrics=parts.metrics,
            tracing=self._tracing,
        )
        self._encoding.start()
        exits.push_async_callback(self._encoding.stop)
        parts.metrics.watch(
            held_bytes=parts.store.held_bytes,
            pinned=parts.store.pinned,
            queued_patches=lambda: self._encoding.queued_patches,
        )
        expiring = asyncio.create_task(self._expire_leases(), name="expire-leases")
        exits.callback(expiring.cancel)
        self._metrics_server = await asyncio.to_thread(
            MetricsServer, self._registry, address=f"{settings.host}:{settings.metrics_port}"
        )
        exits.push_async_callback(self._metrics_server.aclose)
        self._server = await serve_encode(
            self, token=settings.cluster_token, address=f"{settings.host}:{settings.port}"
        )
        exits.push_async_callback(self._server.stop, grace_s=1.0)

    async def _open_transfer(self, exits: contextlib.AsyncExitStack) -> None:
        settings, metrics = self._settings, TransferMetrics(self._registry)
        try:
            transfer = NixlTransfer(
                settings.worker, loopback_only=_is_loopback(settings.host), metrics=metrics
            )
            await asyncio.to_thread(transfer.register, self._parts.store.pool.region)
        except TransferUnavailable as error:
            raise Unavailable(str(error)) from error
        metrics.watch(transfer.pending)
        self._endpoint = to_wire(transfer.endpoint())
        self._transfers = TransferThread(
            transfer, clock=self._clock, serves=lambda: self._leases.counts().held > 0
        )
        self._transfers.start()
        exits.push_async_callback(asyncio.to_thread, self._transfers.stop, timeout_s=_STOP_S)

    async def _expire_leases(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_S)
            self._leases.expire()

    def info(self) -> WorkerInfo:
        """The facts of this moment; it names no cache root, as it holds no blocks."""
        slots = self._parts.store.pool.counts()
        return WorkerInfo(
            worker=self._settings.worker,
            role=WorkerRole.ENCODE,
            incarnation=self._settings.incarnation,
            address=self._server.address,
            metrics_address=self._metrics_server.address,
            state=self._state,
            cache_root=b"",
            block_tokens=0,
            max_context_tokens=0,
            queued_tokens=self._encoding.queued_patches,
            running=self._encoding.making,
            free_pages=slots.free,
            total_pages=slots.total,
            step_age_s=self._encoding.step_age_s,
            wire_version=WIRE_VERSION,
            model_name=self._role.model_dir.name,
            encodes=True,
        )

    # -- calls ----------------------------------------------------------------------------------------------

    async def describe(self) -> WorkerDescription:
        """Facts and the door to the embeddings."""
        return WorkerDescription(self.info(), self._endpoint)

    async def encode(self, job: EncodeJob) -> EncodeResult:
        """See ``ImageEncoding.run``."""
        if self._state is not WorkerState.READY:
            raise Draining("this worker takes no new work", worker=self._settings.worker)
        return await self._encoding.run(job)

    async def lend(self, wish: EmbeddingWish, *, deadline_s: float) -> LentEmbeddings:
        """See ``ImageEncoding.lend``."""
        lent = await self._encoding.lend(wish, deadline_s=deadline_s)
        self._transfers.wake()
        return lent

    async def end_loan(self, lease: str, *, incarnation: str) -> bool:
        """End a lease; one of another incarnation never holds."""
        return incarnation == self._settings.incarnation and self._leases.end(LeaseId(lease))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
