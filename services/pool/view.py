"""The workers as a router sees them: the registry's last answer, kept while Redis is away.

A worker leaves the view when the registry, answering, no longer lists it. Silence of the registry changes nothing,
and neither does a registry that came back empty: its ``epoch`` tells a lost store from lost workers, and for one
lease after the loss absence means nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from epdserve.services.errors import Unavailable
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.registry import Listing, Registry
from epdserve.services.types import WorkerInfo, WorkerRole, WorkerState

log = logging.getLogger(__name__)


class ClusterView:
    """Live workers by name. Owned by one event loop.

    Args:
        registry: Read every ``refresh_s`` once started.
        lease_s: How long a worker may take to put itself back after Redis lost its data.
        refresh_s: Between two reads.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        lease_s: float = 5.0,
        refresh_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._lease_s, self._refresh_s, self._clock = lease_s, refresh_s, clock
        self._workers: dict[str, WorkerInfo] = {}
        self._sorted: tuple[WorkerInfo, ...] = ()
        self._epoch = ""
        self._lost_data_at: float | None = None
        self._answered_at: float | None = None
        self._failing = False
        self._unreadable = 0
        self._first = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether the last read was answered."""
        return self._answered_at is not None and not self._failing

    @property
    def age_s(self) -> float:
        """Since the last answer; infinite before the first."""
        return float("inf") if self._answered_at is None else self._clock() - self._answered_at

    def workers(self, role: WorkerRole | None = None) -> tuple[WorkerInfo, ...]:
        """Workers of a role, or all, by name."""
        if role is None:
            return self._sorted
        return tuple(info for info in self._sorted if info.role is role)

    def get(self, worker: str) -> WorkerInfo | None:
        """One worker, None if it is not alive."""
        return self._workers.get(worker)

    def store_of(self, machine: str) -> WorkerInfo | None:
        """The store of a machine that takes work, None without one; of two lives in one view the later one."""
        found = [
            info
            for info in self.workers(WorkerRole.STORE)
            if info.machine == machine and info.state is WorkerState.READY
        ]
        return max(found, key=lambda info: info.incarnation, default=None)

    async def drain(self, worker: str, wanted: bool) -> None:
        """Have a worker take no new work, or take it again.

        Raises:
            Unavailable: The registry does not answer.
        """
        await self._registry.drain(worker, wanted)

    @property
    def epoch(self) -> str:
        """Name of the present filling of the registry; another one means that its data was lost in between."""
        return self._epoch

    async def start(self, *, wait_s: float = 0.0) -> bool:
        """Begin reading; wait up to ``wait_s`` for the first answer.

        Returns:
            Whether there is one.
        """
        self._task = asyncio.create_task(self._read_regularly(), name="cluster-view")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._first.wait()
        return self._answered_at is not None

    async def close(self) -> None:
        """Stop reading; the last view stays readable. The registry is its owner's to close."""
        self._closed = True  # a call that just ends may swallow the cancellation
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5.0)

    async def refresh(self) -> bool:
        """Read once; whether the registry answered."""
        try:
            listing = await self._registry.list()
        except Unavailable as error:
            if not self._failing:
                log.warning("registry away, view kept", extra={"reason": str(error)})
            self._failing = True
            return False
        if self._failing:
            log.info("registry is back", extra={"workers": len(listing.workers)})
        self._failing = False
        self._apply(listing)
        self._first.set()
        return True

    def _apply(self, listing: Listing) -> None:
        now = self._clock()
        self._answered_at = now
        if self._epoch and self._epoch != listing.epoch:
            log.warning("registry lost its data", extra={"workers": len(self._workers)})
            self._lost_data_at = now
        self._epoch = listing.epoch
        if listing.unreadable != self._unreadable:
            self._unreadable = listing.unreadable
            log.warning("registry holds records of another version", extra={"records": listing.unreadable})
        heard = {info.worker: info for info in listing.workers}
        for worker, info in heard.items():
            known = self._workers.get(worker)
            # after a loss of data the fences are gone, too: a former life may have spoken first
            if known is None or known.incarnation <= info.incarnation:
                self._workers[worker] = info
        if self._lost_data_at is None or now - self._lost_data_at >= self._lease_s:
            self._lost_data_at = None
            self._workers = heard
        self._sorted = tuple(sorted(self._workers.values(), key=lambda info: info.worker))

    async def _read_regularly(self) -> None:
        while not self._closed:
            await self.refresh()
            await asyncio.sleep(self._refresh_s)


@asynccontextmanager
async def open_view(pool: PoolConfig, *, wait_s: float = 0.0) -> AsyncIterator[ClusterView]:
    """A view with a registry connection of its own, for as long as the block runs; waits so long for a first answer."""
    async with Registry(
        pool.redis_url, namespace=pool.namespace, lease_s=pool.lease_s, timeout_s=pool.redis_timeout_s
    ) as registry:
        view = ClusterView(registry, lease_s=pool.lease_s, refresh_s=pool.refresh_s)
        try:
            await view.start(wait_s=wait_s)
            yield view
        finally:
            await view.close()
