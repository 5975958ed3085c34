"""How long to wait between two looks at transfers."""

from __future__ import annotations

import time
from typing import Final

MOVING_S: Final = (
    0.00003  # of processor time: a look that finds nothing takes a third of it, a segment of 256 KiB more
)


class Pauses:
    """No pause while bytes move, else longer and longer ones. For one thread.

    Over TCP bytes move only while somebody looks, a segment at a time, so that a pause after each look costs a large
    part of the rate. Nobody says whether a look moved anything, but it shows: it took the processor longer. (NIXL's
    calls keep Python's lock, so a look never waits for it.)

    Args:
        shortest_s: The first pause. longest_s: The last one; each is twice the one before.
    """

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s, self._longest_s, self._pause_s = shortest_s, longest_s, shortest_s
        self._began_s = time.thread_time()

    def begin(self) -> None:
        """A look begins."""
        self._began_s = time.thread_time()

    def next_s(self, *, reads: int = 1, news: bool = False) -> float:
        """The look is over: seconds to sleep; 0.0 still lets others have Python's lock.

        Args:
            reads: How many it looked at. news: It found something that calls for another look soon.
        """
        if time.thread_time() - self._began_s > MOVING_S * (1 + reads):
            self._pause_s = self._shortest_s
            return 0.0
        pause_s = self._shortest_s if news else self._pause_s
        self._pause_s = min(2 * pause_s, self._longest_s)
        return pause_s
