"""Block events of one worker for any number of listeners: a snapshot each, then what changes.

The block manager's events have one reader, which is this feed. A listener that does not keep up gets a new snapshot
instead of a growing queue.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from time import monotonic
from typing import Protocol

from epdserve.kvstore.set_digest import set_digest
from epdserve.kvstore.types import BlockEvents, BlockHash
from epdserve.services.types import BlockUpdate

INTERVAL_S = 0.05
DIGEST_S = 1.0
# Of the loop's time, at most: very many blocks have their digest told less often. Up to 0.1 s for one it is each 2 s,
# so that drift is healed within 3 s: about two million blocks.
_DIGEST_SHARE = 0.05
MAX_PENDING_UPDATES = 64


class EventSource(Protocol):
    """Numbered changes of a set of blocks, for one reader: a ``BlockManager``, a cache."""

    def drain_events(self) -> BlockEvents:
        """What changed since the last call."""

    def snapshot(self) -> tuple[int, tuple[BlockHash, ...]]:
        """Number of the next event, and everything held."""


class BlockFeed:
    """Owned by the event loop it was started on.

    Args:
        incarnation: Life of the worker that the numbers belong to.
    """

    def __init__(
        self,
        blocks: EventSource,
        incarnation: str,
        *,
        interval_s: float = INTERVAL_S,
        max_pending: int = MAX_PENDING_UPDATES,
    ) -> None:
        self._blocks, self._incarnation = blocks, incarnation
        self._interval_s, self._max_pending = interval_s, max_pending
        self._listeners: set[_Listener] = set()
        self._pump: asyncio.Task[None] | None = None
        self._digest_at = 0.0

    def start(self) -> None:
        """Begin to pass events on."""
        self._digest_at = monotonic() + DIGEST_S
        self._pump = asyncio.get_running_loop().create_task(self._pass_on(), name="block-feed")

    async def stop(self) -> None:
        """End every iteration of ``watch``."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])
        for listener in self._listeners:
            listener.ended = True
            listener.wake.set()

    async def watch(self) -> AsyncIterator[BlockUpdate]:
        """A snapshot, then deltas that follow one another, until the caller or the feed stops."""
        listener = _Listener()
        try:
            yield self._begin(listener)
            while not listener.ended:
                await listener.wake.wait()
                listener.wake.clear()
                if listener.lost:
                    yield self._begin(listener)
                while listener.updates and not listener.lost:
                    yield listener.updates.popleft()
        finally:
            self._listeners.discard(listener)

    def poll(self) -> None:
        """Pass on what has changed since the last call."""
        events = self._blocks.drain_events()
        if events.added or events.removed:
            self._pass(events)

    def _pass(self, events: BlockEvents) -> None:
        if not events.added and not events.removed:
            return
        update = BlockUpdate(
            incarnation=self._incarnation,
            snapshot=False,
            first_seq=events.first_seq,
            next_seq=events.next_seq,
            added=tuple(events.added),
            removed=tuple(events.removed),
        )
        for listener in self._listeners:
            listener.lost = listener.lost or len(listener.updates) >= self._max_pending
            if not listener.lost:
                listener.updates.append(update)
            listener.wake.set()

    def tell_digest(self) -> bool:
        """Tell what is held by its digest, so that a listener that knows otherwise notices; False if it changes now."""
        next_seq, hashes = self._blocks.snapshot()
        events = self._blocks.drain_events()
        if events.added or events.removed or events.first_seq != next_seq:
            self._pass(events)  # the snapshot may hold some of them already: another time
            return False
        digest = set_digest(hashes)
        for listener in self._listeners:
            if not listener.lost and len(listener.updates) < self._max_pending:
                listener.updates.append(
                    BlockUpdate(self._incarnation, False, next_seq, next_seq, (), (), digest)
                )
                listener.wake.set()
        return True

    def _begin(self, listener: "_Listener") -> BlockUpdate:
        """A snapshot; the listener's next delta begins where it ends, as what is pending goes to the others first."""
        self.poll()
        self._listeners.add(listener)
        listener.updates.clear()
        listener.lost = False
        next_seq, hashes = self._blocks.snapshot()
        return BlockUpdate(
            incarnation=self._incarnation,
            snapshot=True,
            first_seq=next_seq,
            next_seq=next_seq,
            added=tuple(hashes),
            removed=(),
        )

    async def _pass_on(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.poll()
            now = monotonic()
            if self._listeners and now >= self._digest_at and self.tell_digest():
                self._digest_at = now + digest_pause_s(monotonic() - now)


def digest_pause_s(took_s: float) -> float:
    """From the beginning of one digest, which took so long, to the next one."""
    return max(DIGEST_S, took_s / _DIGEST_SHARE)


class _Listener:
    def __init__(self) -> None:
        self.updates: deque[BlockUpdate] = deque()
        self.wake = asyncio.Event()
        self.lost = False
        self.ended = False
