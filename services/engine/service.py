"""What the processes of prefill and decode workers have in common: opening, stopping, facts, the end of a life.

A role builds its worker and its server; this says in which order everything is opened, and that it is closed in the
reverse order.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from epdserve.kvstore.types import MemoryRegion
from epdserve.services.engine.block_feed import BlockFeed
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.host import EngineHost, Load
from epdserve.services.engine.lender import PageLender
from epdserve.services.engine.metrics import EngineWorker
from epdserve.services.engine.seat import Seat
from epdserve.services.engine.step_loop import StepLoop
from epdserve.services.engine.store_desk import StoreDesk
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.engine.transfer_thread import TransferThread
from epdserve.services.errors import Internal
from epdserve.services.observability.metrics import new_registry
from epdserve.services.observability.tracing import tracing_from_environment
from epdserve.services.rpc.pages import LentPages
from epdserve.services.rpc.server import RpcServer
from epdserve.services.types import BlockUpdate, WorkerDescription, WorkerInfo, WorkerState
from prometheus_client import CollectorRegistry

STOP_S: Final = 10.0
_FLUSH_S: Final = 2.0  # for what was sealed last to reach the store


class EngineService(ABC):
    """One worker with a model. Created, started and stopped on one event loop, once each."""

    def __init__(self, seat: Seat, engine: EngineSettings) -> None:
        self._seat, self._engine = seat, engine
        self._exits = contextlib.AsyncExitStack()
        self._state = WorkerState.STARTING
        self._crashed = False
        self._tracing = tracing_from_environment(f"epdserve-{seat.role.value}", seat.worker)

    # -- what a role says -----------------------------------------------------------------------------------

    @abstractmethod
    async def _open_cluster(self, exits: contextlib.AsyncExitStack) -> Callable[[], WorkerInfo | None]:
        """Begin to look at the registry; returns a finder of this machine's store."""

    @abstractmethod
    async def _open_worker(self, exits: contextlib.AsyncExitStack) -> EngineWorker:
        """Build what the step loop runs; what is put into ``exits`` ends before the loop does.

        Loop, desk and transfers are there and do not run yet.
        """

    @abstractmethod
    async def _serve(self) -> RpcServer:
        """Take calls."""

    @abstractmethod
    async def _drain(self, drain_s: float) -> None:
        """Let what runs end for up to ``drain_s``, then hand over or fail the rest."""

    @abstractmethod
    def _tell_crash(self, error: Internal) -> None:
        """Tell whoever waits for this worker, in the loop's thread; free nothing, as the books may be wrong."""

    def _own_memory(self, registry: CollectorRegistry) -> Sequence[MemoryRegion]:
        """Take what memory for transfers the role needs beside the engine's; in a thread, before anything else.

        Raises:
            Unavailable: It cannot be had.
        """
        return ()

    def _is_read(self) -> bool:
        """Whether a peer may be reading from here; its pages are then held with reason."""
        return False

    # -- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load, listen, take work.

        Raises:
            Unavailable: The model, the transport or an address cannot be used.
        """
        async with contextlib.AsyncExitStack() as opening:
            await self._open(opening)
            self._exits = opening.pop_all()
        self._state = WorkerState.READY

    async def stop(self, drain_s: float) -> None:
        """Take no new work, let what runs end for up to ``drain_s``, let go of everything."""
        self._state = WorkerState.DRAINING
        if not self._crashed:
            await self._drain(drain_s)
            await self._desk.flush(deadline_s=_FLUSH_S)
        await self._exits.aclose()
        await asyncio.to_thread(self._tracing.close)

    def info(self) -> WorkerInfo:
        """The facts of this moment.

        Raises:
            Internal: The step loop has crashed, so that this life must end.
        """
        if self._crashed:
            raise Internal("the step loop has crashed", worker=self._seat.worker)
        worker = self._worker
        return self._host.info(
            Load(
                worker.queued_tokens,
                worker.active,
                self._loop.step_age_s,
                self._desk.speeds.speeds().bytes_per_s,
            ),
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

    async def lend_blocks(self, hashes: tuple[bytes, ...], *, exact: bool) -> LentPages:
        """Lend pages to the store of another machine."""
        lent = self._lender.lend(hashes, exact=exact)
        self._transfers.wake()
        return lent

    async def return_blocks(self, lease: str, *, incarnation: str) -> bool:
        """Pages that were lent have been read."""
        return self._lender.end(lease, incarnation=incarnation)

    async def forget_blocks(self) -> int:
        """Offer nothing of what waits to be offered, and find no block that is here now."""
        self._desk.forget_offers()
        return await asyncio.to_thread(self._host.runner.blocks.forget_all)

    async def _open(self, exits: contextlib.AsyncExitStack) -> None:
        seat = self._seat
        self._host = host = await asyncio.to_thread(self._open_host)
        exits.push_async_callback(asyncio.to_thread, host.close)
        self._lender = PageLender(host.runner.blocks, host.clock, seat.incarnation)
        self._transfers = TransferThread(
            host.transfer,
            clock=host.clock,
            serves=lambda: self._is_read() or self._desk.busy or self._lender.held > 0,
        )
        exits.push_async_callback(asyncio.to_thread, self._transfers.stop, timeout_s=STOP_S)
        find_store = await self._open_cluster(exits)
        self._loop = StepLoop(
            f"{seat.role.value}-steps", lambda: self._worker.step(), clock=host.clock, on_crash=self._on_crash
        )
        self._desk = StoreDesk(
            host.runner,
            self._transfers,
            self._loop,
            find_store,
            seat=seat,
            use=self._engine.store,
            metrics=StoreMetrics(host.registry),
            handing_off=self._is_read,
        )
        exits.push_async_callback(asyncio.to_thread, self._loop.stop, timeout_s=STOP_S)
        self._worker = await self._open_worker(exits)
        self._transfers.start()
        self._loop.start()
        self._desk.start()
        exits.push_async_callback(self._desk.stop)
        self._lender.start()
        exits.push_async_callback(self._lender.stop)
        self._feed = BlockFeed(host.runner.blocks, seat.incarnation)
        self._feed.start()
        exits.push_async_callback(self._feed.stop)
        self._watch_metrics()
        self._server = await self._serve()
        exits.push_async_callback(self._server.stop, grace_s=1.0)

    def _open_host(self) -> EngineHost:
        registry = new_registry()
        regions = self._own_memory(registry)
        return EngineHost(self._engine, self._seat, registry=registry, regions=regions)

    def _watch_metrics(self) -> None:
        def idle() -> bool:
            return self._worker.idle and not self._is_read() and self._desk.idle and not self._lender.held

        self._host.metrics.watch(
            self._worker,
            leaked_pages=self._host.leaked_pages(idle),
            step_age_s=lambda: self._loop.step_age_s,
        )

    def _on_crash(self, error: BaseException) -> None:
        self._crashed = True
        self._tell_crash(Internal("the step loop has crashed", worker=self._seat.worker))
