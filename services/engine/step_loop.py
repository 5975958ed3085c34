"""The step loop: one plain thread that owns a worker's device objects.

Other threads reach those objects only through commands, which run between two steps. A step that finds nothing to do
puts the loop to sleep until a command comes or the tick is over, so an idle worker costs no processor time.
"""

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from epdserve.kvstore.clock import Clock
from epdserve.services.errors import Internal, Overloaded, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

# Python's default of 5 ms would let one thread keep the lock for a whole step of its neighbours.
SWITCH_INTERVAL_S: Final = 0.0005


class StepLoop:
    """Runs ``step`` for as long as it returns True, and commands in between.

    Thread-safe: ``submit``, ``call``, ``step_age_s``, ``start``, ``stop``. Everything that ``step`` and the commands
    touch is owned by the loop's thread.

    Args:
        name: Name of the thread.
        step: One step; returns whether there may be more to do at once.
        clock: For the age of the running step.
        max_commands: Bound of the command queue.
        tick_s: Longest sleep of an idle loop, so that ``step`` also sweeps what expires.
        on_crash: Told, in the loop's thread, the error that ended the loop.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        *,
        clock: Clock,
        max_commands: int = 4096,
        tick_s: float = 0.25,
        on_crash: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._step, self._clock, self._on_crash = step, clock, on_crash
        self._max_commands, self._tick_s = max_commands, tick_s
        self._commands: deque[tuple[Callable[[], None], Callable[[BaseException], object]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._woken = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread.start()

    def stop(self, *, timeout_s: float) -> None:
        """Run the commands that are queued, then end the thread.

        Raises:
            TimeoutError: A step was still running after ``timeout_s``.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name} still in a step after {timeout_s} s")

    @property
    def running(self) -> bool:
        """Whether commands are still taken."""
        return self._thread.is_alive() and not self._stopping

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began, 0 between steps; heartbeats report it."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, self._clock.monotonic() - since)

    @property
    def queued_commands(self) -> int:
        """Commands that wait for the end of the step."""
        return len(self._commands)

    def wake(self) -> None:
        """Let an idle loop step now: something it waits for may have come free."""
        with self._wake:
            self._woken = True
            self._wake.notify()

    def submit(
        self, command: Callable[[], None], on_lost: Callable[[BaseException], object] = lambda error: None
    ) -> None:
        """Queue a command. It must not raise: an error in it ends the loop.

        ``on_lost`` is told if the loop crashes before the command ran.

        Raises:
            Overloaded: The queue is full.
            Unavailable: The loop has ended.
        """
        with self._wake:
            if self._stopping:
                raise Unavailable(f"{self._thread.name} has ended")
            if len(self._commands) >= self._max_commands:
                raise Overloaded(
                    f"{self._max_commands} commands wait for {self._thread.name}", retry_after_s=1.0
                )
            self._commands.append((command, on_lost))
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a function; its result, or the error it raised, comes with the future.

        Raises:
            Overloaded: The queue is full.
            Unavailable: The loop has ended.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001 - edge: the error belongs to the caller
                future.set_exception(error)
            else:
                future.set_result(result)

        self.submit(run, future.set_exception)
        return future

    def _run(self) -> None:
        try:
            more = False
            while self._wait(at_once=more):
                self._busy_since = self._clock.monotonic()
                while self._commands:
                    self._commands[0][0]()
                    self._commands.popleft()
                more = self._step()
                self._busy_since = None
        except Exception as error:  # edge: a worker that cannot step must say so and be replaced
            log.exception("step loop crashed", extra={"loop": self._thread.name})
            self._end_after(error)

    def _wait(self, *, at_once: bool) -> bool:
        """Sleep until there is something to do; False once the loop must end and no command is left."""
        with self._wake:
            if not (at_once or self._woken or self._commands or self._stopping):
                self._wake.wait(self._tick_s)
            self._woken = False
            return bool(self._commands) or not self._stopping

    def _end_after(self, error: BaseException) -> None:
        """Take no more commands and tell those that wait; the running step keeps ageing in the heartbeat."""
        with self._wake:
            self._stopping = True
        for _, on_lost in self._commands:
            on_lost(Internal(f"{self._thread.name} crashed"))
        self._on_crash(error)
