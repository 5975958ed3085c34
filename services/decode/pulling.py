"""The asynchronous half of a hand-off: find the peer, pull, verify, end the lease.

Runs on the event loop and owns no page: what to do with the destination is decided by the step loop, which is told how
the pull ended and whether the transfer is over.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.transfer_thread import PendingRead, ReadOutcome, TransferThread
from epdserve.services.errors import ServiceError
from epdserve.services.types import KVHandle

log = logging.getLogger(__name__)


class PullOutcome(StrEnum):
    """How a hand-off ended; label of the metric."""

    DONE = "done"
    REFUSED = "refused"  # the handle does not fit this worker or this prompt
    NO_PEER = "no_peer"  # unknown, another incarnation, or unreachable
    FAILED = "failed"  # the transfer ended without its bytes
    CORRUPT = "corrupt"  # the bytes are not the promised ones
    LATE = "late"  # the deadline passed, the transfer may still write
    LEASE_LOST = "lease_lost"  # the bytes may have been recycled while they were read
    CANCELLED = "cancelled"


_OF_READ = {
    ReadOutcome.FAILED: PullOutcome.FAILED,
    ReadOutcome.LATE: PullOutcome.LATE,
}


class Peers(Protocol):
    """Prefill workers as this worker knows them, never as a client names them. Used on the event loop."""

    async def endpoint(self, worker: str, *, incarnation: str, deadline_s: float) -> Endpoint:
        """The door to a worker's memory.

        Raises:
            ServiceError: It is not known, lives another life, or does not answer.
        """

    async def release_lease(self, handle: KVHandle, *, deadline_s: float) -> bool:
        """End a handle's lease; whether it still held.

        Raises:
            ServiceError: The worker does not answer.
        """


@dataclass(slots=True, eq=False)
class Pull:
    """One hand-off under way.

    Attributes:
        copies: What to read; the destinations belong to this pull until ``read`` is over.
        verify: Whether the destinations hold the promised bytes; only reads them, in a thread of its own.
        read: The transfer, once it was started.
    """

    handle: KVHandle
    copies: Sequence[Copy]
    verify: Callable[[], bool]
    on_end: Callable[["Pull", PullOutcome], None]
    read: PendingRead | None = None
    task: asyncio.Task[PullOutcome] | None = None


class PullDriver:
    """Runs pulls, and ends leases of handles that nobody will pull.

    ``start``, ``cancel`` and ``end_lease_soon`` may be called from any thread; everything else is on the event loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transfers: TransferThread,
        peers: Peers,
        *,
        deadline_s: float,
        lease_call_deadline_s: float,
        max_lease_calls: int = 1024,
    ) -> None:
        self._loop, self._transfers, self._peers = loop, transfers, peers
        self._deadline_s, self._lease_call_deadline_s = deadline_s, lease_call_deadline_s
        self._max_lease_calls = max_lease_calls
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._tasks: set[asyncio.Task[PullOutcome]] = set()
        self._lease_calls: set[asyncio.Task[None]] = set()

    def start(self, pull: Pull) -> None:
        """Begin; ``pull.on_end`` is called on the event loop exactly once."""
        self._loop.call_soon_threadsafe(self._start, pull)

    def cancel(self, pull: Pull) -> None:
        """End a pull early; ``pull.on_end`` still comes."""
        self._loop.call_soon_threadsafe(lambda: pull.task.cancel() if pull.task is not None else None)

    def end_lease_soon(self, handle: KVHandle) -> None:
        """Let a worker have its pages back without waiting for the lease to expire."""
        self._loop.call_soon_threadsafe(self._end_lease_soon, handle)

    async def stop(self) -> None:
        """Cancel every pull and wait for their ends; lease calls get their deadline."""
        for task in self._tasks:
            task.cancel()
        running = [*self._tasks, *self._lease_calls]
        if running:
            await asyncio.wait(running, timeout=2 * self._lease_call_deadline_s)
        self._verifier.shutdown(wait=False)

    def _start(self, pull: Pull) -> None:
        pull.task = self._loop.create_task(self._pull(pull), name="pull")
        self._tasks.add(pull.task)
        pull.task.add_done_callback(lambda task: self._ended(pull, task))

    def _ended(self, pull: Pull, task: asyncio.Task[PullOutcome]) -> None:
        """A callback and no ``finally``: a task that is cancelled before its first step runs none."""
        self._tasks.discard(task)
        outcome = _outcome(pull, task)
        if outcome not in (PullOutcome.DONE, PullOutcome.CORRUPT, PullOutcome.LEASE_LOST):
            self._end_lease_soon(pull.handle)
        pull.on_end(pull, outcome)

    async def _pull(self, pull: Pull) -> PullOutcome:
        handle = pull.handle
        async with asyncio.timeout(self._deadline_s) as scope:
            endpoint = await self._peers.endpoint(
                handle.worker, incarnation=handle.incarnation, deadline_s=self._deadline_s
            )
            ends_at = scope.when()
            assert ends_at is not None
            pull.read = self._transfers.read(
                endpoint, pull.copies, deadline_s=max(0.0, ends_at - self._loop.time())
            )
            read = await asyncio.wrap_future(pull.read.future)
        if read is not ReadOutcome.DONE:
            return _OF_READ[read]
        # the bytes are here: the peer needs to keep them no longer, whether they are right or not
        sound, held = await asyncio.gather(
            self._loop.run_in_executor(self._verifier, pull.verify),
            self._peers.release_lease(handle, deadline_s=self._lease_call_deadline_s),
        )
        if not sound:
            return PullOutcome.CORRUPT
        return PullOutcome.DONE if held else PullOutcome.LEASE_LOST

    def _end_lease_soon(self, handle: KVHandle) -> None:
        if len(self._lease_calls) >= self._max_lease_calls:
            return  # the lease ends by itself
        task = self._loop.create_task(self._end_lease(handle), name="end-lease")
        self._lease_calls.add(task)
        task.add_done_callback(self._lease_calls.discard)

    async def _end_lease(self, handle: KVHandle) -> None:
        try:
            await self._peers.release_lease(handle, deadline_s=self._lease_call_deadline_s)
        except ServiceError as error:
            log.debug("lease not ended", extra={"peer": handle.worker, "error": error.code})


def _outcome(pull: Pull, task: asyncio.Task[PullOutcome]) -> PullOutcome:
    if task.cancelled():
        return PullOutcome.CANCELLED
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, TimeoutError) and pull.read is not None:
        return PullOutcome.LATE
    if isinstance(error, ServiceError | TimeoutError):
        log.warning("peer not reached", extra={"peer": pull.handle.worker, "error": type(error).__name__})
        return PullOutcome.NO_PEER
    log.error("hand-off broke", extra={"peer": pull.handle.worker}, exc_info=error)
    return PullOutcome.FAILED
