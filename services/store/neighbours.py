"""What other machines hold, in stores and in workers' pages: a block index that their events feed.

The registry says who is there. Each neighbour has a task that watches its blocks; a snapshot comes with every
connection, so whatever was missed is made good. What is found here is a hint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.block_index import BlockIndex
from epdserve.kvstore.types import BlockEvents, BlockHash
from epdserve.services.pool.view import ClusterView
from epdserve.services.rpc.watch import watch_blocks
from epdserve.services.store.tasks import Tasks, end
from epdserve.services.types import BlockUpdate, WorkerInfo, WorkerRole

log = logging.getLogger(__name__)

LOOK_S = 0.25
_HOLDERS: Final = (WorkerRole.STORE, WorkerRole.PREFILL, WorkerRole.DECODE)


@dataclass(slots=True, eq=False)
class _Watch:
    incarnation: str
    role: WorkerRole
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class Holder:
    """A neighbour that holds the first ``blocks`` of a chain."""

    worker: str
    incarnation: str
    role: WorkerRole
    blocks: int


class Neighbours:
    """Owned by one event loop; the view is its owner's to start and close.

    Args:
        view: Of the registry.
        worker: This store, which watches others.
        machine: Its machine.
        token: The cluster token.
    """

    def __init__(self, view: ClusterView, *, worker: str, machine: str, token: str) -> None:
        self._view, self._worker, self._machine, self._token = view, worker, machine, token
        self._index = BlockIndex()
        self._watches: dict[str, _Watch] = {}
        self._ending = Tasks()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the registry."""
        self._task = asyncio.create_task(self._follow(), name="neighbours")

    async def stop(self) -> None:
        """End all watches."""
        tasks = [watch.task for watch in self._watches.values()]
        if self._task is not None:
            tasks.append(self._task)
        self._watches.clear()
        await end(tasks)
        await self._ending.wait(5.0)

    @property
    def present(self) -> bool:
        """Whether the registry lists a store on another machine."""
        return any(self._wanted(info) for info in self._view.workers(WorkerRole.STORE))

    @property
    def watched(self) -> int:
        """Stores and workers whose blocks are followed."""
        return len(self._watches)

    def known_blocks(self) -> int:
        """Blocks that somebody else holds, as far as is known."""
        return self._index.counts().hashes

    def holders(self, hashes: Sequence[BlockHash]) -> list[Holder]:
        """Who holds a chain from its beginning on, the longest part first; stores before workers, ties by name."""
        lengths = self._index.longest_prefix(hashes)
        found = [
            Holder(worker, watch.incarnation, watch.role, blocks)
            for worker, blocks in lengths.items()
            if (watch := self._watches.get(worker)) is not None
        ]
        return sorted(found, key=lambda one: (-one.blocks, one.role is not WorkerRole.STORE, one.worker))

    async def _follow(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Watch who has come, forget who has gone."""
        present = {info.worker: info for info in self._view.workers() if self._wanted(info)}
        for worker, watch in list(self._watches.items()):
            info = present.get(worker)
            if info is None or info.incarnation != watch.incarnation:
                self._ending.start(end([watch.task]), "end-watch")
                del self._watches[worker]
                self._index.forget(worker)
        for worker, info in present.items():
            if worker not in self._watches:
                task = asyncio.create_task(self._watch(info), name=f"watch {worker}")
                self._watches[worker] = _Watch(info.incarnation, info.role, task)

    def _wanted(self, info: WorkerInfo) -> bool:
        return info.role in _HOLDERS and info.machine != self._machine and info.worker != self._worker

    async def _watch(self, info: WorkerInfo) -> None:
        updates = watch_blocks(info.address, role=info.role, token=self._token)
        async with aclosing(updates):
            async for update in updates:
                watch = self._watches.get(info.worker)
                if watch is None or watch.task is not asyncio.current_task():
                    return  # this neighbour has been forgotten
                if update.incarnation == info.incarnation:
                    self._apply(info.worker, update)

    def _apply(self, worker: str, update: BlockUpdate) -> None:
        added = tuple(BlockHash(block_hash) for block_hash in update.added)
        if update.snapshot:
            self._index.load_snapshot(worker, update.next_seq, added)
            return
        removed = tuple(BlockHash(block_hash) for block_hash in update.removed)
        # updates of a watch follow one another, so nothing is missing here
        self._index.apply(worker, BlockEvents(update.first_seq, added, removed))
