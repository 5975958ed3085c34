"""The thread that owns a worker's ``Transfer``: pulls run here, off the step loop and off the event loop.

Over shared memory a read copies inside the call that starts it; over TCP both sides must poll, and a peer that hangs
is never reported. So this thread starts reads, polls while something is outstanding, keeps deadlines of its own, and
remembers a read past its deadline until the transfer is really over: only then may its destination be used again.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.errors import KVStoreError
from epdserve.kvstore.transfer.base import Copy, Transfer, TransferState, TransferTicket
from epdserve.kvstore.transfer.pacing import Pauses
from epdserve.kvstore.types import Endpoint
from epdserve.services.errors import Overloaded, Unavailable

log = logging.getLogger(__name__)

SHORTEST_POLL_S: Final = 0.0001
LONGEST_POLL_S: Final = 0.002


class ReadOutcome(StrEnum):
    """How a pull ended for whoever waits for it."""

    DONE = "done"
    FAILED = "failed"  # the transfer is over; the destination holds anything
    LATE = "late"  # the deadline passed and the transfer is still running: quarantine the destination


def _uncancellable() -> "Future[ReadOutcome]":
    """A future that a cancelled waiter leaves alone: the transfer goes on and must be able to report its end."""
    future: Future[ReadOutcome] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True)
class PendingRead:
    """One pull, from its request to the end of the transfer."""

    endpoint: Endpoint
    copies: Sequence[Copy]
    deadline_at: float
    future: Future[ReadOutcome] = field(default_factory=_uncancellable)
    ticket: TransferTicket | None = None
    over: bool = False
    on_over: Callable[[], None] | None = None


class TransferThread:
    """Runs reads for one worker and keeps a source answering.

    Thread-safe: every public method. The ``Transfer`` itself is touched by this thread only, after ``start``.

    Args:
        transfer: Connected to nothing yet; its regions are registered.
        serves: Whether peers may be reading from here (open leases); while True the transfer is polled.
        max_pending: Bound of reads queued and running, late ones included.
    """

    def __init__(
        self,
        transfer: Transfer,
        *,
        clock: Clock,
        serves: Callable[[], bool] = lambda: False,
        max_pending: int = 256,
        name: str = "transfer",
    ) -> None:
        self._transfer, self._clock, self._serves, self._max_pending = transfer, clock, serves, max_pending
        self._wake = threading.Condition()
        self._queued: deque[PendingRead] = deque()
        self._running: list[PendingRead] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; it takes the transfer over."""
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Fail what is queued, close the transfer and end the thread. Late reads are over with that."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        else:
            self._transfer.close()

    @property
    def outstanding(self) -> int:
        """Reads queued or running, late ones included."""
        return len(self._queued) + len(self._running)

    def wake(self) -> None:
        """Look at ``serves`` again: a lease was granted."""
        with self._wake:
            self._wake.notify()

    def read(self, endpoint: Endpoint, copies: Sequence[Copy], *, deadline_s: float) -> PendingRead:
        """Start pulling; the outcome comes with ``PendingRead.future`` within about ``deadline_s``.

        Args:
            endpoint: The peer to read from.
            copies: What to read, and where to.
            deadline_s: From now on.

        Raises:
            Overloaded: Too many reads are outstanding.
            Unavailable: The thread has ended.
        """
        read = PendingRead(endpoint, copies, self._clock.monotonic() + deadline_s)
        with self._wake:
            if self._stopping:
                raise Unavailable("the transfer thread has ended")
            if self.outstanding >= self._max_pending:
                raise Overloaded(f"{self._max_pending} transfers are outstanding", retry_after_s=1.0)
            self._queued.append(read)
            self._wake.notify()
        return read

    def settle(self, read: PendingRead, on_over: Callable[[], None]) -> bool:
        """Whether the transfer is over. If it is not, ``on_over`` is called in this thread once it is."""
        with self._wake:
            if read.over:
                return True
            read.on_over = on_over
            return False

    def _run(self) -> None:
        pauses = Pauses(SHORTEST_POLL_S, LONGEST_POLL_S)
        while self._wait():
            pauses.begin()
            moved = self._start_queued() + self._poll_running()
            if self._running or self._serves():
                self._transfer.progress()
                time.sleep(pauses.next_s(reads=len(self._running), news=moved > 0))
        self._transfer.close()
        for read in [*self._queued, *self._running]:
            self._finish(read, ReadOutcome.FAILED)

    def _wait(self) -> bool:
        with self._wake:
            while not (self._stopping or self._queued or self._running or self._serves()):
                self._wake.wait()
            return not self._stopping

    def _start_queued(self) -> int:
        started = 0
        while self._queued:
            with self._wake:
                read = self._queued.popleft()
                self._running.append(read)
            try:
                peer = self._transfer.connect(read.endpoint)
                read.ticket = self._transfer.read(peer, read.copies)
            except (
                KVStoreError,
                ValueError,
            ) as error:  # a handle may name regions that the peer does not have
                log.warning("read refused", extra={"peer": read.endpoint.agent, "error": str(error)})
                self._running.remove(read)
                self._finish(read, ReadOutcome.FAILED)
            started += 1
        return started

    def _poll_running(self) -> int:
        moved, now = 0, self._clock.monotonic()
        for read in list(self._running):
            assert read.ticket is not None
            state = read.ticket.poll()
            if state is not TransferState.PENDING:
                self._running.remove(read)
                self._finish(read, ReadOutcome.DONE if state is TransferState.DONE else ReadOutcome.FAILED)
                moved += 1
            elif now >= read.deadline_at and not read.future.done():
                read.future.set_result(ReadOutcome.LATE)
        return moved

    def _finish(self, read: PendingRead, outcome: ReadOutcome) -> None:
        with self._wake:
            read.over = True
            on_over = read.on_over
        if on_over is not None:
            on_over()
        if not read.future.done():
            read.future.set_result(outcome)
