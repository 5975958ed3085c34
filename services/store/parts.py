"""The parts of a store, put together once: opened in order, closed in reverse."""

from __future__ import annotations

import asyncio
import ipaddress
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Final

from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import TransferUnavailable
from epdserve.kvstore.host_metrics import TailDirectoryMetrics
from epdserve.kvstore.metrics import TransferMetrics
from epdserve.kvstore.tail_directory import RedisTailDirectory
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.services.engine.block_feed import BlockFeed
from epdserve.services.engine.endpoint import to_wire
from epdserve.services.engine.peer_book import PeerBook
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.errors import Unavailable
from epdserve.services.observability.metrics import new_registry
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.view import ClusterView
from epdserve.services.pool.worker_service import WorkerSettings
from epdserve.services.store.config import StoreSettings
from epdserve.services.store.deletions import Deletions
from epdserve.services.store.events import StoreEvents
from epdserve.services.store.fetches import Fetches
from epdserve.services.store.geometry import StoreGeometry
from epdserve.services.store.memory import StoreMemory
from epdserve.services.store.metrics import StoreMetrics
from epdserve.services.store.neighbours import Neighbours
from epdserve.services.store.offloads import Offloads
from epdserve.services.store.peer_blocks import PeerBlocks
from epdserve.services.store.pulls import Puller
from epdserve.services.store.saver import Saver
from epdserve.services.store.tail_notices import TailNotices
from epdserve.services.store.tail_reader import TailReader
from epdserve.services.store.tail_search import TailSearch
from epdserve.services.store.tails import TailDesk
from epdserve.services.store.upkeep import Upkeep
from epdserve.services.types import TransferEndpoint

_STOP_S: Final = 10.0


class Parts:
    """Everything of a store but its server. Owned by one event loop; ``open`` first, once.

    Attributes:
        registry: All metrics of the process.
        endpoint: The door to the memory.
        executor: Waits for disks and verifies.
    """

    def __init__(self, settings: WorkerSettings, role: StoreSettings) -> None:
        self._settings, self._role = settings, role
        self.clock: Clock = SystemClock()
        self.registry = new_registry()
        self.metrics = StoreMetrics(self.registry)
        self.deletions = Deletions(self.clock)

    async def open(self, exits: AsyncExitStack) -> None:
        """Take the memory, recover the disks, begin to follow the registry; ``exits`` undoes it.

        Raises:
            Unavailable: Memory, a directory or the transport cannot be used.
        """
        await self._open_memory(exits)
        await self._open_transfer(exits)
        view = await self._open_view(exits)
        self._open_bringing(exits, view)
        self._open_tails(exits, view)
        self.feed = BlockFeed(StoreEvents(self.memory.cache, self.memory.tier), self._settings.incarnation)
        self.feed.start()
        exits.push_async_callback(self.feed.stop)
        upkeep = Upkeep(self.memory, self.notices, self.book, view, self._role)
        upkeep.start()
        exits.push_async_callback(upkeep.stop)
        self._watch_metrics()

    async def _open_memory(self, exits: AsyncExitStack) -> None:
        self.geometry = await asyncio.to_thread(StoreGeometry.of, self._role)
        self.memory = await asyncio.to_thread(
            StoreMemory, self._role, self.geometry, self.clock, self.registry
        )
        exits.push_async_callback(asyncio.to_thread, self.memory.close)

    async def _open_transfer(self, exits: AsyncExitStack) -> None:
        settings, memory, metrics = self._settings, self.memory, TransferMetrics(self.registry)
        try:
            transfer = NixlTransfer(
                settings.worker, loopback_only=_is_loopback(settings.host), metrics=metrics
            )
            for region in (memory.block_slots.region, memory.tail_slots.region):
                await asyncio.to_thread(transfer.register, region)
        except TransferUnavailable as error:
            raise Unavailable(str(error)) from error
        metrics.watch(transfer.pending)
        self.endpoint: TransferEndpoint = to_wire(transfer.endpoint())
        self.transfers = TransferThread(
            transfer, clock=self.clock, serves=lambda: memory.leases.counts().held > 0
        )
        self.transfers.start()
        exits.push_async_callback(asyncio.to_thread, self.transfers.stop, timeout_s=_STOP_S)

    async def _open_view(self, exits: AsyncExitStack) -> ClusterView:
        pool = self._settings.pool
        registry = Registry(
            pool.redis_url, namespace=pool.namespace, lease_s=pool.lease_s, timeout_s=pool.redis_timeout_s
        )
        exits.push_async_callback(registry.close)
        view = ClusterView(registry, lease_s=pool.lease_s, refresh_s=pool.refresh_s)
        exits.push_async_callback(view.close)
        await view.start()
        self.book = PeerBook(view, token=self._settings.cluster_token)
        exits.push_async_callback(self.book.close)
        return view

    def _open_bringing(self, exits: AsyncExitStack, view: ClusterView) -> None:
        """What moves blocks."""
        settings, role, memory, metrics = self._settings, self._role, self.memory, self.metrics
        self.executor = executor = ThreadPoolExecutor(role.threads, "store")
        exits.callback(executor.shutdown, wait=False)
        self._puller = puller = Puller(self.transfers)
        self.saver = Saver(memory.cache, memory.tier, metrics, max_blocks=role.max_unsaved_blocks)
        self.saver.start()
        exits.push_async_callback(self.saver.stop, drain_s=_STOP_S / 2)
        self.neighbours = neighbours = Neighbours(
            view,
            worker=settings.worker,
            machine=settings.pool.machine_name,
            token=settings.cluster_token,
        )
        if role.ask_peers:
            neighbours.start()
            exits.push_async_callback(neighbours.stop)
        self.fetches = Fetches(
            memory,
            self.saver,
            executor,
            role,
            metrics,
            self.clock,
            incarnation=settings.incarnation,
            peers=self._peer_blocks() if role.ask_peers else None,
        )
        exits.push_async_callback(self.fetches.stop)
        self.offloads = Offloads(
            memory, self.saver, self.book, puller, executor, role, metrics, self.clock, self.deletions
        )
        exits.push_async_callback(self.offloads.stop)

    def _peer_blocks(self) -> PeerBlocks:
        return PeerBlocks(
            self.memory,
            self.neighbours,
            self.book,
            self._puller,
            self.executor,
            self.metrics,
            self.deletions,
            deadline_s=self._role.peer_deadline_s,
        )

    def _open_tails(self, exits: AsyncExitStack, view: ClusterView) -> None:
        """What moves tails."""
        settings, role, memory, metrics = self._settings, self._role, self.memory, self.metrics
        reader = TailReader(memory, self._puller, self.executor)
        directory, search = None, None
        if role.ask_peers:
            directory = RedisTailDirectory(
                settings.pool.redis_url,
                namespace=settings.pool.namespace,
                deadline_s=role.directory_deadline_s,
                metrics=TailDirectoryMetrics(self.registry),
            )
            exits.push_async_callback(directory.close)
            search = TailSearch(
                memory,
                self.book,
                reader,
                directory,
                role,
                metrics,
                self.clock,
                self.deletions,
                worker=settings.worker,
                useful=lambda: view.connected and self.neighbours.present,
            )
        self.notices = TailNotices(
            memory, directory, metrics, worker=settings.worker, incarnation=settings.incarnation
        )
        self.tails = TailDesk(
            memory,
            self.book,
            reader,
            self.notices,
            search,
            role,
            metrics,
            self.clock,
            self.deletions,
            incarnation=settings.incarnation,
        )
        exits.push_async_callback(self.tails.stop)

    def _watch_metrics(self) -> None:
        self.metrics.watch(
            {
                "unsaved_waiting_blocks": ("Blocks that wait for the SSD tier", lambda: self.saver.unsaved),
                "offloading_blocks": (
                    "Blocks being read from workers",
                    lambda: self.offloads.in_flight,
                ),
                "fetches_running": ("Fetches under way", lambda: self.fetches.running),
                "neighbours": ("Stores whose blocks are followed", lambda: self.neighbours.watched),
                "neighbour_blocks": ("Blocks they hold", self.neighbours.known_blocks),
                "ssd_missing": (
                    "1 where directories are configured and none serves",
                    lambda: float(bool(self._role.ssd.directories) and self.memory.tier is None),
                ),
                "broken_parts": ("Parts that do not add up; not 0 means a bug", self.memory.problems),
            }
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
