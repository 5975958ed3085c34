"""Waiting with a limit, at next to no cost a wait.

``asyncio.timeout`` makes and cancels a timer each time, some 10 us; a stream would pay it several times a token. Here
one timer a stream looks now and then whether the present wait has lasted too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Patience:
    """Calls back once when one wait has lasted ``seconds``. Owned by the event loop; close it when done.

    Usage: ``begin()`` before a wait, ``end()`` after it. Callbacks come between ``seconds`` and twice that.
    """

    def __init__(self, seconds: float, on_exhausted: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_exhausted = on_exhausted
        self._since: float | None = None
        self._timer = self._loop.call_later(seconds, self._look)

    def begin(self) -> None:
        """A wait begins now."""
        self._since = self._loop.time()

    def end(self) -> None:
        """It is over."""
        self._since = None

    def close(self) -> None:
        """No callback comes after this."""
        self._since = None
        self._timer.cancel()

    def _look(self) -> None:
        waited_s = 0.0 if self._since is None else self._loop.time() - self._since
        left_s = self._seconds - waited_s
        if left_s <= 0:
            self._since, left_s = None, self._seconds
            self._on_exhausted()
        self._timer = self._loop.call_later(left_s, self._look)


class StallGuard:
    """Limits each wait between ``begin`` and ``end``, of the task that makes it: that task is cancelled."""

    def __init__(self, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._expired = False
        self._patience = Patience(seconds, self._expire)
        self.begin = self._patience.begin
        self.end = self._patience.end

    def close(self, error: BaseException | None) -> bool:
        """No wait is limited any more; whether ``error`` is a cancellation of its own and of nobody else."""
        self._patience.close()
        if not self._expired:
            return False
        return self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()
