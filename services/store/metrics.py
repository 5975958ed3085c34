"""Prometheus metrics of a store's own work. Every name has a row in this folder's README.

What lies in memory, on disk and under leases is in the tables of ``kvstore/README.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

OFFLOADS: Final = ("taken", "held", "busy", "no_room", "unread", "late", "corrupt", "misfit")
FETCH_ENDS: Final = ("complete", "missing", "no_room", "time", "lease", "cancelled")
PEER_READS: Final = ("done", "missing", "unreached", "unread", "late", "lease_lost", "corrupt", "no_room")
UNSAVED: Final = ("backlog", "failed")


class StoreMetrics:
    """Of one store. Counters are fed by its parts, gauges read at scrape time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        counter = partial(Counter, registry=registry)
        self.offloaded = counter("epdserve_store_offloaded_blocks", "Blocks offered by workers", ["result"])
        self.offloaded_tails = counter(
            "epdserve_store_offloaded_tails", "Tails offered by workers", ["result"]
        )
        self.fetched = counter("epdserve_store_fetched_blocks", "Blocks lent to readers", ["tier"])
        self.fetches = counter("epdserve_store_fetches", "Fetches that ended", ["reason"])
        self.tail_lookups = counter("epdserve_store_tail_lookups", "Questions for a tail", ["result"])
        self.peer_blocks = counter("epdserve_store_peer_blocks", "Blocks asked of peers", ["outcome"])
        self.peer_tails = counter("epdserve_store_peer_tails", "Tails asked of peers", ["outcome"])
        self.unsaved = counter(
            "epdserve_store_unsaved_blocks", "Blocks never offered to the SSD tier", ["reason"]
        )
        self.suspects = counter(
            "epdserve_store_suspect_blocks", "Lent blocks that a reader found wrong", ["verdict"]
        )
        self.published = counter("epdserve_store_published_tails", "Tails told to the directory", ["result"])
        self.refused_calls = counter(
            "epdserve_store_refused_calls", "Calls refused because of a bound", ["call"]
        )
        self.seconds = Histogram(
            "epdserve_store_call_seconds", "Time of a call", ["call"], buckets=_SECONDS, registry=registry
        )

    @classmethod
    def unregistered(cls) -> StoreMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def watch(self, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        """Export gauges by name, without the prefix: what they say, and how they are read. Once per registry."""
        for name, (text, read) in gauges.items():
            Gauge(f"epdserve_store_{name}", text, registry=self._registry).set_function(read)
