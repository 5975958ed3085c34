"""Work that runs to its end, whoever stops waiting for it: what fills slots must also give them back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_CANCELS: Final = 10
_WAIT_S: Final = 0.5


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for them; again where a call that just ended by itself swallowed the cancellation."""
    left = [task for task in tasks if not task.done()]
    for _ in range(_CANCELS):
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_WAIT_S)
        left = [task for task in left if not task.done()]
    for task in left:
        log.error("task does not end", extra={"task": task.get_name()})


class Tasks:
    """Tasks of one part of a store. Owned by one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run in the background; an error that nobody takes is none of anybody's."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run and wait; cancelling the wait leaves the work alone."""
        return await asyncio.shield(self.start(work, name))

    async def wait(self, timeout_s: float) -> None:
        """Until all have ended, or the time is over."""
        if self._running:
            await asyncio.wait(self._running, timeout=timeout_s)

    def __len__(self) -> int:
        return len(self._running)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # taken, so that asyncio does not complain
