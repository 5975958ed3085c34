"""Promises with an end: while a lease holds, the pages behind it keep their bytes for a peer that reads them.

Expired means ended, collected or not: ``end`` answers by the clock. Thread-safe.
"""

from __future__ import annotations

import heapq
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.metrics import LeaseMetrics
from epdserve.kvstore.types import LeaseId


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    """What became of the leases so far."""

    held: int
    released: int
    expired: int


@dataclass(frozen=True, slots=True)
class _Lease:
    expires_at: float
    on_end: Callable[[], None]


class LeaseTable:
    """Grants leases and ends them, by release or by time. ``on_end`` runs exactly once, outside the lock."""

    def __init__(self, clock: Clock | None = None, *, metrics: LeaseMetrics | None = None) -> None:
        self._clock = clock or SystemClock()
        self._metrics = metrics or LeaseMetrics.unregistered()
        self._lock = threading.Lock()
        self._leases: dict[LeaseId, _Lease] = {}
        self._ends: list[tuple[float, LeaseId]] = []  # heap; may name leases that are gone
        self._released = 0
        self._expired = 0

    def grant(self, ttl_s: float, on_end: Callable[[], None]) -> LeaseId:
        """Promise something for ``ttl_s`` seconds.

        Args:
            ttl_s: Positive; how long the promise holds. on_end: Takes the promise back (unpins pages, frees a
            slot). Called once, by ``end``, ``expire`` or
                ``end_all``, in their thread.

        Returns:
            A name nobody can guess: who knows it may end the lease.
        """
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be positive, got {ttl_s}")
        lease_id = LeaseId(secrets.token_hex(16))
        expires_at = self._clock.monotonic() + ttl_s
        with self._lock:
            self._leases[lease_id] = _Lease(expires_at, on_end)
            heapq.heappush(self._ends, (expires_at, lease_id))
        self._metrics.granted.inc()
        return lease_id

    def end(self, lease_id: LeaseId) -> bool:
        """End a lease; says whether it still held, that is, whether what was read under it can be trusted."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            held = lease is not None and self._clock.monotonic() < lease.expires_at
            self._released += held
            self._expired += lease is not None and not held
        self._metrics.ended.labels(how="released" if held else "late").inc()
        if lease is not None:
            lease.on_end()
        return held

    def expire(self) -> int:
        """Collect the leases whose time is over; returns how many.

        Call often: their pages stay pinned until then.
        """
        count = 0
        while (lease := self._pop_expired()) is not None:
            count += 1
            self._metrics.ended.labels(how="expired").inc()
            lease.on_end()
        return count

    def end_all(self) -> int:
        """End every lease, for a worker that stops; returns how many there were."""
        with self._lock:
            leases = list(self._leases.values())
            self._leases.clear()
            self._ends.clear()
            self._expired += len(leases)
        for lease in leases:
            self._metrics.ended.labels(how="expired").inc()
            lease.on_end()
        return len(leases)

    def counts(self) -> LeaseCounts:
        """Leases held, expired but not collected ones among them, and how the others ended."""
        with self._lock:
            return LeaseCounts(len(self._leases), self._released, self._expired)

    def _pop_expired(self) -> _Lease | None:
        now = self._clock.monotonic()
        with self._lock:
            # entries of released leases go when they surface, at the latest when their time comes
            while self._ends and (self._ends[0][0] <= now or self._ends[0][1] not in self._leases):
                lease = self._leases.pop(heapq.heappop(self._ends)[1], None)
                if lease is not None:
                    self._expired += 1
                    return lease
        return None
