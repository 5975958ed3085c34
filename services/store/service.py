"""A store's process: the Store service in front of memory, disks and neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from epdserve.kvstore.ssd.errors import DeletionIncomplete
from epdserve.kvstore.types import BlockHash, BlockOwner, LeaseId
from epdserve.services.config import parse_config
from epdserve.services.errors import Draining, InvalidRequest, Unavailable
from epdserve.services.observability.metrics import MetricsServer
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.rpc.server import RpcServer
from epdserve.services.rpc.store_servicer import serve_store
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.memory import CHECKSUM
from epdserve.services.store.parts import Parts
from epdserve.services.store_types import (
    HASH_BYTES,
    Deleted,
    FetchBatch,
    FetchRequest,
    FoundTail,
    OffloadRequest,
    OffloadResult,
    TailOffer,
    TailQuery,
    TierRun,
)
from epdserve.services.types import (
    WIRE_VERSION,
    BlockUpdate,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
)

log = logging.getLogger(__name__)

_STOP_S = 10.0


def build(settings: Mapping[str, Any]) -> StoreService:
    """The service that the pool starts."""
    worker = WorkerSettings.model_validate(settings)
    return StoreService(worker, parse_config(worker.role, StoreSettings, source="store"))


class StoreService:
    """One store. Created, started and stopped on one event loop, once each."""

    def __init__(self, settings: WorkerSettings, role: StoreSettings) -> None:
        self._settings, self._role = settings, role
        self._exits = contextlib.AsyncExitStack()
        self._state = WorkerState.STARTING
        self._parts = Parts(settings, role)

    # -- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the memory, recover the disks, listen.

        Raises:
            Unavailable: Memory, a directory, the transport or an address cannot be used.
        """
        async with contextlib.AsyncExitStack() as opening:
            await self._open(opening)
            self._exits = opening.pop_all()
        self._state = WorkerState.READY

    async def stop(self, drain_s: float) -> None:
        """Let readers end their leases for up to ``drain_s``, bring to disk what waits, let go of everything."""
        self._state = WorkerState.DRAINING
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._parts.memory.leases.counts().held:  # noqa: ASYNC110 - leases end in any thread
                    await asyncio.sleep(0.02)
        await self._exits.aclose()

    async def _open(self, exits: contextlib.AsyncExitStack) -> None:
        settings, parts = self._settings, self._parts
        await parts.open(exits)
        self._metrics_server = await asyncio.to_thread(
            MetricsServer, parts.registry, address=f"{settings.host}:{settings.metrics_port}"
        )
        exits.push_async_callback(self._metrics_server.aclose)
        self._server: RpcServer = await serve_store(
            self, token=settings.cluster_token, address=f"{settings.host}:{settings.port}"
        )
        exits.push_async_callback(self._server.stop, grace_s=1.0)

    def info(self) -> WorkerInfo:
        """The facts of this moment. A store serves workers of any cache root, so it names none."""
        slots = self._parts.memory.block_slots.counts()
        return WorkerInfo(
            worker=self._settings.worker,
            role=WorkerRole.STORE,
            incarnation=self._settings.incarnation,
            address=self._server.address,
            metrics_address=self._metrics_server.address,
            state=self._state,
            cache_root=b"",
            block_tokens=self._parts.geometry.block_tokens,
            max_context_tokens=0,
            queued_tokens=0,
            running=self._parts.fetches.running,
            free_pages=slots.free,
            total_pages=slots.total,
            step_age_s=0.0,
            wire_version=WIRE_VERSION,
            model_name="" if self._role.model_dir is None else self._role.model_dir.name,
        )

    # -- calls ----------------------------------------------------------------------------------------------

    async def describe(self) -> WorkerDescription:
        """Facts and the door to the memory."""
        return WorkerDescription(self.info(), self._parts.endpoint)

    def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        """A snapshot of the blocks held in memory or on disk, then what changes."""
        return self._parts.feed.watch()

    async def offload(
        self, request: OffloadRequest, *, deadline_s: float | None
    ) -> tuple[OffloadResult, ...]:
        """See ``StoreHandler.offload``."""
        self._require_ready()
        return await self._parts.offloads.run(request, deadline_s=deadline_s)

    async def locate(
        self, hashes: tuple[bytes, ...], *, exact: bool, local_only: bool
    ) -> tuple[TierRun, ...]:
        """See ``StoreHandler.locate``."""
        return self._parts.fetches.locate(_named(hashes), exact=exact, local_only=local_only)

    async def fetch(
        self, request: FetchRequest, *, deadline_s: float | None
    ) -> AsyncGenerator[FetchBatch, None]:
        """See ``StoreHandler.fetch``."""
        self._require_ready()
        async with contextlib.aclosing(self._parts.fetches.run(request, deadline_s=deadline_s)) as batches:
            async for batch in batches:
                self._parts.transfers.wake()
                yield batch

    async def end_fetch(self, lease: str, *, incarnation: str, suspects: tuple[bytes, ...]) -> bool:
        """End a lease; one of another incarnation never holds."""
        if incarnation != self._settings.incarnation:
            return False
        held = self._parts.memory.leases.end(LeaseId(lease))
        if suspects:
            bad = await asyncio.get_running_loop().run_in_executor(
                self._parts.executor, self._parts.memory.cache.recheck, _named(suspects), CHECKSUM
            )
            self._parts.metrics.suspects.labels(verdict="corrupt").inc(bad)
            self._parts.metrics.suspects.labels(verdict="sound").inc(len(suspects) - bad)
        return held

    async def offload_tail(self, offer: TailOffer, *, deadline_s: float | None) -> OffloadResult:
        """See ``StoreHandler.offload_tail``."""
        self._require_ready()
        return await self._parts.tails.take(offer, deadline_s=deadline_s)

    async def fetch_tail(self, query: TailQuery, *, deadline_s: float | None) -> FoundTail | None:
        """See ``StoreHandler.fetch_tail``."""
        self._require_ready()
        found = await self._parts.tails.find(query, deadline_s=deadline_s)
        self._parts.transfers.wake()
        return found

    async def touch(self, hashes: tuple[bytes, ...]) -> None:
        """See ``StoreHandler.touch``."""
        if self._parts.memory.tier is not None:
            self._parts.memory.tier.touch(_named(hashes))

    async def delete_tenant(self, tenant: bytes) -> Deleted:
        """See ``StoreHandler.delete_tenant``."""
        if len(tenant) != HASH_BYTES:
            raise InvalidRequest(f"a tenant's label has {HASH_BYTES} bytes", param="tenant")
        self._parts.deletions.note_tenant(tenant)
        tier = self._parts.memory.tier
        return await self._delete(
            lambda owner: owner.tenant == tenant,
            None if tier is None else partial(tier.delete_tenant, tenant),
        )

    async def delete_root(self, root: bytes) -> Deleted:
        """See ``StoreHandler.delete_root``; roots that agree in their first 16 bytes are one on disk."""
        if len(root) < HASH_BYTES:
            raise InvalidRequest(f"a root has {HASH_BYTES} bytes or more", param="root")
        self._parts.deletions.note_root(root)
        tier = self._parts.memory.tier
        return await self._delete(
            lambda owner: owner.root[:HASH_BYTES] == root[:HASH_BYTES],
            None if tier is None else partial(tier.delete_root, root),
        )

    # -- within ---------------------------------------------------------------------------------------------

    async def _delete(
        self, condemned: Callable[[BlockOwner], bool], on_disk: Callable[[], int] | None
    ) -> Deleted:
        """Memory first, so that nothing is offered to the disks any more; then those, where it takes long.

        Raises:
            Unavailable: A drive that has failed may bring bytes back; everything else is deleted.
        """
        memory, incomplete = self._parts.memory, None
        async with self._parts.saver.paused():
            blocks = memory.cache.delete_owned(condemned)
            tails = memory.tails.delete_owned(condemned)
            try:
                stored = 0 if on_disk is None else await asyncio.to_thread(on_disk)
            except DeletionIncomplete as error:
                stored, incomplete = error.deleted, error
            blocks += memory.cache.delete_owned(condemned)  # what was on its way up from the disk
        await self._parts.notices.withdraw(tails)
        if incomplete is not None:
            raise Unavailable(str(incomplete), worker=self._settings.worker)
        return Deleted(blocks, stored, len(tails))

    def _require_ready(self) -> None:
        if self._state is not WorkerState.READY:
            raise Draining("this store takes no new work", worker=self._settings.worker)


def _named(hashes: tuple[bytes, ...]) -> list[BlockHash]:
    return [BlockHash(block_hash) for block_hash in hashes]
