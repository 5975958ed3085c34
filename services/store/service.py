"""A store's process: the Store service in front of memory, disks and neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import TransferUnavailable
from epdserve.kvstore.host_metrics import TailDirectoryMetrics
from epdserve.kvstore.metrics import TransferMetrics
from epdserve.kvstore.tail_directory import RedisTailDirectory
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import BlockHash, BlockOwner, LeaseId
from epdserve.services.config import parse_config
from epdserve.services.engine.block_feed import BlockFeed
from epdserve.services.engine.endpoint import to_wire
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.errors import Draining, InvalidRequest, Unavailable
from epdserve.services.observability.metrics import MetricsServer, new_registry
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.view import ClusterView
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.rpc.server import RpcServer
from epdserve.services.rpc.store_servicer import serve_store
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.events import StoreEvents
from epdserve.services.store.fetches import Fetches
from epdserve.services.store.geometry import StoreGeometry
from epdserve.services.store.memory import CHECKSUM, StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.neighbours import Neighbours
from epdserve.services.store.offloads import Offloads
from epdserve.services.store.peer_blocks import PeerBlocks
from epdserve.services.store.peers import PeerBook
from epdserve.services.store.pulls import Puller
from epdserve.services.store.saver import Saver
from epdserve.services.store.tails import TailDesk
from epdserve.services.store.upkeep import Upkeep
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
    TransferEndpoint,
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
        self._clock: Clock = SystemClock()

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
                while self._memory.leases.counts().held:  # noqa: ASYNC110 - leases end in any thread
                    await asyncio.sleep(0.02)
        await self._exits.aclose()

    async def _open(self, exits: contextlib.AsyncExitStack) -> None:
        self._registry = new_registry()
        self._metrics = StoreMetrics(self._registry)
        await self._open_memory(exits)
        view = await self._open_view(exits)
        self._book = PeerBook(view, token=self._settings.cluster_token)
        exits.push_async_callback(self._book.close)
        await self._open_parts(exits, view)
        self._watch_metrics()
        self._metrics_server = await asyncio.to_thread(
            MetricsServer, self._registry, address=f"{self._settings.host}:0"
        )
        exits.push_async_callback(self._metrics_server.aclose)
        self._server: RpcServer = await serve_store(
            self, token=self._settings.cluster_token, address=f"{self._settings.host}:0"
        )
        exits.push_async_callback(self._server.stop, grace_s=1.0)

    async def _open_memory(self, exits: contextlib.AsyncExitStack) -> None:
        settings, role = self._settings, self._role
        self._geometry = await asyncio.to_thread(StoreGeometry.of, role)
        self._memory = memory = await asyncio.to_thread(
            StoreMemory, role, self._geometry, self._clock, self._registry
        )
        exits.push_async_callback(asyncio.to_thread, memory.close)
        transfer_metrics = TransferMetrics(self._registry)
        try:
            transfer = NixlTransfer(
                settings.worker, loopback_only=_is_loopback(settings.host), metrics=transfer_metrics
            )
            for region in (memory.block_slots.region, memory.tail_slots.region):
                await asyncio.to_thread(transfer.register, region)
        except TransferUnavailable as error:
            raise Unavailable(str(error)) from error
        transfer_metrics.watch(transfer.pending)
        self._endpoint: TransferEndpoint = to_wire(transfer.endpoint())
        self._transfers = TransferThread(
            transfer, clock=self._clock, serves=lambda: memory.leases.counts().held > 0
        )
        self._transfers.start()
        exits.push_async_callback(asyncio.to_thread, self._transfers.stop, timeout_s=_STOP_S)

    async def _open_view(self, exits: contextlib.AsyncExitStack) -> ClusterView:
        pool = self._settings.pool
        registry = Registry(
            pool.redis_url, namespace=pool.namespace, lease_s=pool.lease_s, timeout_s=pool.redis_timeout_s
        )
        exits.push_async_callback(registry.close)
        view = ClusterView(registry, lease_s=pool.lease_s, refresh_s=pool.refresh_s)
        exits.push_async_callback(view.close)
        await view.start()
        return view

    async def _open_parts(self, exits: contextlib.AsyncExitStack, view: ClusterView) -> None:
        settings, role, memory, metrics = self._settings, self._role, self._memory, self._metrics
        self._executor = executor = ThreadPoolExecutor(role.threads, "store")
        exits.callback(executor.shutdown, wait=False)
        puller = Puller(self._transfers)
        self._saver = saver = Saver(memory.cache, memory.tier, metrics, max_blocks=role.max_unsaved_blocks)
        saver.start()
        exits.push_async_callback(saver.stop, drain_s=_STOP_S / 2)
        neighbours = Neighbours(
            view,
            worker=settings.worker,
            machine=settings.pool.machine_name,
            token=settings.cluster_token,
        )
        self._neighbours = neighbours
        peers, directory = None, None
        if role.ask_peers:
            neighbours.start()
            exits.push_async_callback(neighbours.stop)
            peers = PeerBlocks(
                memory, neighbours, self._book, puller, executor, metrics, deadline_s=role.peer_deadline_s
            )
            directory = RedisTailDirectory(
                settings.pool.redis_url,
                namespace=settings.pool.namespace,
                deadline_s=role.directory_deadline_s,
                metrics=TailDirectoryMetrics(self._registry),
            )
            exits.push_async_callback(directory.close)
        self._fetches = Fetches(
            memory,
            saver,
            executor,
            role,
            metrics,
            self._clock,
            incarnation=settings.incarnation,
            peers=peers,
        )
        exits.push_async_callback(self._fetches.stop)
        self._offloads = Offloads(memory, saver, self._book, puller, executor, role, metrics, self._clock)
        exits.push_async_callback(self._offloads.stop)
        self._tails = TailDesk(
            memory,
            self._book,
            puller,
            executor,
            role,
            metrics,
            self._clock,
            worker=settings.worker,
            incarnation=settings.incarnation,
            directory=directory,
        )
        exits.push_async_callback(self._tails.stop)
        self._feed = BlockFeed(StoreEvents(memory.cache, memory.tier), settings.incarnation)
        self._feed.start()
        exits.push_async_callback(self._feed.stop)
        upkeep = Upkeep(memory, self._tails, self._book, view, role)
        upkeep.start()
        exits.push_async_callback(upkeep.stop)

    def info(self) -> WorkerInfo:
        """The facts of this moment. A store serves workers of any cache root, so it names none."""
        slots = self._memory.block_slots.counts()
        return WorkerInfo(
            worker=self._settings.worker,
            role=WorkerRole.STORE,
            incarnation=self._settings.incarnation,
            address=self._server.address,
            metrics_address=self._metrics_server.address,
            state=self._state,
            cache_root=b"",
            block_tokens=self._geometry.block_tokens,
            max_context_tokens=0,
            queued_tokens=0,
            running=self._fetches.running,
            free_pages=slots.free,
            total_pages=slots.total,
            step_age_s=0.0,
            wire_version=WIRE_VERSION,
            model_name="" if self._role.model_dir is None else self._role.model_dir.name,
        )

    # -- calls ----------------------------------------------------------------------------------------------

    async def describe(self) -> WorkerDescription:
        """Facts and the door to the memory."""
        return WorkerDescription(self.info(), self._endpoint)

    def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        """A snapshot of the blocks held in memory or on disk, then what changes."""
        return self._feed.watch()

    async def offload(
        self, request: OffloadRequest, *, deadline_s: float | None
    ) -> tuple[OffloadResult, ...]:
        """See ``StoreHandler.offload``."""
        self._require_ready()
        return await self._offloads.run(request, deadline_s=deadline_s)

    async def locate(
        self, hashes: tuple[bytes, ...], *, exact: bool, local_only: bool
    ) -> tuple[TierRun, ...]:
        """See ``StoreHandler.locate``."""
        return self._fetches.locate(_named(hashes), exact=exact, local_only=local_only)

    async def fetch(
        self, request: FetchRequest, *, deadline_s: float | None
    ) -> AsyncGenerator[FetchBatch, None]:
        """See ``StoreHandler.fetch``."""
        self._require_ready()
        async with contextlib.aclosing(self._fetches.run(request, deadline_s=deadline_s)) as batches:
            async for batch in batches:
                self._transfers.wake()
                yield batch

    async def end_fetch(self, lease: str, *, incarnation: str, suspects: tuple[bytes, ...]) -> bool:
        """End a lease; one of another incarnation never holds."""
        if incarnation != self._settings.incarnation:
            return False
        held = self._memory.leases.end(LeaseId(lease))
        if suspects:
            bad = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._memory.cache.recheck, _named(suspects), CHECKSUM
            )
            self._metrics.suspects.labels(verdict="corrupt").inc(bad)
            self._metrics.suspects.labels(verdict="sound").inc(len(suspects) - bad)
        return held

    async def offload_tail(self, offer: TailOffer, *, deadline_s: float | None) -> OffloadResult:
        """See ``StoreHandler.offload_tail``."""
        self._require_ready()
        return await self._tails.take(offer, deadline_s=deadline_s)

    async def fetch_tail(self, query: TailQuery, *, deadline_s: float | None) -> FoundTail | None:
        """See ``StoreHandler.fetch_tail``."""
        self._require_ready()
        found = await self._tails.find(query, deadline_s=deadline_s)
        self._transfers.wake()
        return found

    async def touch(self, hashes: tuple[bytes, ...]) -> None:
        """See ``StoreHandler.touch``."""
        if self._memory.tier is not None:
            self._memory.tier.touch(_named(hashes))

    async def delete_tenant(self, tenant: bytes) -> Deleted:
        """See ``StoreHandler.delete_tenant``."""
        if len(tenant) != HASH_BYTES:
            raise InvalidRequest(f"a tenant's label has {HASH_BYTES} bytes", param="tenant")
        tier = self._memory.tier
        return await self._delete(
            lambda owner: owner.tenant == tenant,
            None if tier is None else partial(tier.delete_tenant, tenant),
        )

    async def delete_root(self, root: bytes) -> Deleted:
        """See ``StoreHandler.delete_root``; roots that agree in their first 16 bytes are one on disk."""
        if len(root) < HASH_BYTES:
            raise InvalidRequest(f"a root has {HASH_BYTES} bytes or more", param="root")
        tier = self._memory.tier
        return await self._delete(
            lambda owner: owner.root[:HASH_BYTES] == root[:HASH_BYTES],
            None if tier is None else partial(tier.delete_root, root),
        )

    # -- within ---------------------------------------------------------------------------------------------

    async def _delete(
        self, condemned: Callable[[BlockOwner], bool], on_disk: Callable[[], int] | None
    ) -> Deleted:
        """Memory first, so that nothing is offered to the disks any more; then those, where it takes long."""
        memory = self._memory
        async with self._saver.paused():
            blocks = memory.cache.delete_owned(condemned)
            tails = memory.tails.delete_owned(condemned)
            stored = 0 if on_disk is None else await asyncio.to_thread(on_disk)
        await self._tails.withdraw(tails)
        return Deleted(blocks, stored, len(tails))

    def _require_ready(self) -> None:
        if self._state is not WorkerState.READY:
            raise Draining("this store takes no new work", worker=self._settings.worker)

    def _watch_metrics(self) -> None:
        self._metrics.watch(
            {
                "unsaved_waiting_blocks": ("Blocks that wait for the SSD tier", lambda: self._saver.unsaved),
                "offloading_blocks": (
                    "Blocks being read from workers",
                    lambda: self._offloads.in_flight,
                ),
                "fetches_running": ("Fetches under way", lambda: self._fetches.running),
                "neighbours": ("Stores whose blocks are followed", lambda: self._neighbours.watched),
                "neighbour_blocks": ("Blocks they hold", self._neighbours.known_blocks),
                "ssd_missing": (
                    "1 where directories are configured and none serves",
                    lambda: float(bool(self._role.ssd.directories) and self._memory.tier is None),
                ),
                "broken_parts": ("Parts that do not add up; not 0 means a bug", self._memory.problems),
            }
        )


def _named(hashes: tuple[bytes, ...]) -> list[BlockHash]:
    return [BlockHash(block_hash) for block_hash in hashes]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
