"""Time of the tier, the day's write budget and second-hit admission: small state that decides nothing by itself."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.ssd.retention import DAY_S
from epdserve.kvstore.types import BlockHash

_BURST_S: Final = 3600  # so much of a day's budget may be written at once


class TierTime:
    """Seconds that age blocks: the monotonic clock while running, at most ``max_downtime_s`` over a restart.

    A wall clock that jumps, forward or back, therefore cannot make blocks look older than they are by more than that.
    """

    def __init__(self, clock: Clock, *, wall: Callable[[], float] = time.time) -> None:
        self._clock, self._wall = clock, wall
        self._base = wall()
        self._started = clock.monotonic()

    def resume(self, saved: tuple[int, int] | None, *, latest_s: int, max_downtime_s: int) -> None:
        """Go on after a restart.

        Args:
            saved: Tier time and wall clock when last noted, if known. latest_s: No block was used later.
            max_downtime_s: Longest time that may have passed since.
        """
        tier_s, wall_s = saved or (latest_s, int(self._wall()))
        passed = min(max(0.0, self._wall() - wall_s), max_downtime_s)
        self._base = max(tier_s + passed, latest_s)
        self._started = self._clock.monotonic()

    def now(self) -> int:
        """Tier time in whole seconds."""
        return int(self._base + self._clock.monotonic() - self._started)

    def stamp(self) -> tuple[int, int]:
        """Tier time and wall clock, to be saved."""
        return self.now(), max(0, int(self._wall()))


class EnduranceBudget:
    """Bytes that may be written a day, so that a drive lives as long as planned. Not thread-safe."""

    def __init__(self, bytes_per_day: int | None, clock: Clock) -> None:
        self._rate = None if bytes_per_day is None else bytes_per_day / DAY_S
        self._clock = clock
        self._left = (self._rate or 0.0) * _BURST_S
        self._at = clock.monotonic()

    @property
    def limited(self) -> bool:
        """Whether there is a budget at all."""
        return self._rate is not None

    def take(self, nbytes: int) -> bool:
        """Spend ``nbytes`` if they are there."""
        if self._rate is None:
            return True
        now = self._clock.monotonic()
        self._left = min(self._rate * _BURST_S, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < nbytes:
            return False
        self._left -= nbytes
        return True


class SecondHit:
    """Admits a block when it comes the second time; remembers the last ``capacity`` first times.

    Not thread-safe.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()

    @property
    def limited(self) -> bool:
        """Whether anything has to come twice."""
        return self._capacity > 0

    def admits(self, block_hash: BlockHash) -> bool:
        """Whether it was seen before; it is from now on. Always, when ``capacity`` is 0."""
        if self._capacity == 0:
            return True
        if block_hash in self._seen:
            del self._seen[block_hash]
            return True
        self._seen[block_hash] = None
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)
        return False
