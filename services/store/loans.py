"""What a reader holds of the cache while its lease lasts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from epdserve.kvstore.host_pins import PinnedBlock
from epdserve.kvstore.lending_cache import LendingCache


class Loan:
    """Pinned blocks that come bit by bit and go all at once. Thread-safe: leases end in any thread."""

    def __init__(self, cache: LendingCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._pinned: list[PinnedBlock] = []
        self._over = False

    def add(self, blocks: Sequence[PinnedBlock]) -> bool:
        """Hold further blocks, the next of the chain; False, and lets go of them, if the loan is over."""
        with self._lock:
            if not self._over:
                self._pinned.extend(blocks)
                return True
        self._cache.release(blocks)
        return False

    def end(self) -> None:
        """Let go of everything; the lease calls this once."""
        with self._lock:
            self._over = True
            pinned, self._pinned = self._pinned, []
        self._cache.release(pinned)
