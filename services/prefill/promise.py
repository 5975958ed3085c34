"""One answer's pages and tail under a lease for each of its readers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.types import LeaseId


class Promise:
    """Given back when the last of its leases has ended, whichever way and in whichever thread each ends.

    Every reader has a lease of its own, so that a lease that is ended twice, by a decode worker that has pulled and by
    a router that gives up, takes nothing from another reader.

    Args:
        on_end: Takes the promise back; called once.
    """

    def __init__(self, leases: LeaseTable, *, readers: int, ttl_s: float, on_end: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left, self._on_end = readers, on_end
        self.leases: tuple[LeaseId, ...] = tuple(leases.grant(ttl_s, self._one_less) for _ in range(readers))

    def _one_less(self) -> None:
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._on_end()
