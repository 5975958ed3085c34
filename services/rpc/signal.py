"""An event for one waiter, at a fraction of the price of asyncio's: a request waits a dozen times."""

from __future__ import annotations

import asyncio


class Signal:
    """Set, cleared and awaited on one event loop; one task waits at a time."""

    __slots__ = ("_set", "_waiter")

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and wake who waits."""
        self._set = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def clear(self) -> None:
        """It is set no more."""
        self._set = False

    def wait(self) -> asyncio.Future[None]:
        """To be awaited: until it is set."""
        waiter = asyncio.get_running_loop().create_future()
        if self._set:
            waiter.set_result(None)
        else:
            self._waiter = waiter
        return waiter
