"""Prometheus metrics of the KV store. Every name has a row in the package's README.

Counters are fed by the objects themselves; gauges are read from them at scrape time, so they cannot drift. An
object that is given no metrics counts into a registry of its own that nobody scrapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from epdserve.kvstore.types import Conservation
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_AGE_BUCKETS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class _HasPages(Protocol):
    def counts(self) -> Conservation: ...


class _HasStates(Protocol):
    @property
    def free(self) -> int: ...
    @property
    def held(self) -> int: ...
    @property
    def quarantined(self) -> int: ...


class BlockMetrics:
    """Of one ``BlockManager``: the device's block cache."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lookups = Counter(
            "epdserve_kvstore_page_cache_blocks",
            "Blocks looked up in the device's pages",
            ["result"],
            registry=registry,
        )
        self._hit = self._lookups.labels(result="hit")
        self._miss = self._lookups.labels(result="miss")
        self._seals = Counter(
            "epdserve_kvstore_blocks_sealed", "Blocks sealed", ["result"], registry=registry
        )
        self._sealed_new = self._seals.labels(result="new")
        self._sealed_again = self._seals.labels(result="duplicate")
        self._evictions = Counter(
            "epdserve_kvstore_page_cache_evictions",
            "Blocks evicted from pages",
            ["reason"],
            registry=registry,
        )
        self._evicted_for_space = self._evictions.labels(reason="space")
        self._evicted_for_exact = self._evictions.labels(reason="replaced_by_exact")
        self._evicted_by_order = self._evictions.labels(reason="deleted")
        self._ages = Histogram(
            "epdserve_kvstore_evicted_idle_seconds",
            "Time since last use of blocks evicted for space",
            registry=registry,
            buckets=_AGE_BUCKETS_S,
        )
        self._refusals = Counter(
            "epdserve_kvstore_reservations_refused",
            "Reservations for which no page could be had",
            registry=registry,
        )

    @classmethod
    def unregistered(cls) -> BlockMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def matched(self, *, hits: int, misses: int) -> None:
        """A prompt was looked up."""
        self._hit.inc(hits)
        self._miss.inc(misses)

    def sealed(self, *, new: int, duplicates: int) -> None:
        """Blocks were sealed, or found to be here already."""
        self._sealed_new.inc(new)
        self._sealed_again.inc(duplicates)

    def evicted(self, idle_s: Sequence[float]) -> None:
        """Blocks were dropped to make room; how long each had been idle."""
        if idle_s:
            self._evicted_for_space.inc(len(idle_s))
            for seconds in idle_s:
                self._ages.observe(seconds)

    def replaced(self) -> None:
        """A tainted block gave way to an exact one."""
        self._evicted_for_exact.inc()

    def forgotten(self, count: int) -> None:
        """Blocks were dropped because somebody wanted them gone."""
        self._evicted_by_order.inc(count)

    def refused(self) -> None:
        """A reservation found no pages."""
        self._refusals.inc()

    def watch(self, blocks: _HasPages, *, page_bytes: int) -> None:
        """Export the gauges of one block manager. Call once per registry."""
        pages = Gauge("epdserve_kvstore_pages", "Pages by phase", ["phase"], registry=self._registry)
        for phase in ("free", "filling", "sealed", "cached", "quarantined"):
            pages.labels(phase=phase).set_function(partial(_pages_in, blocks, phase))
        Gauge(
            "epdserve_kvstore_page_capacity_pages", "Pages of the device", registry=self._registry
        ).set_function(lambda: blocks.counts().total)
        Gauge(
            "epdserve_kvstore_pages_missing", "Pages in no phase; not 0 means a bug", registry=self._registry
        ).set_function(lambda: blocks.counts().missing)
        Gauge(
            "epdserve_kvstore_page_cache_bytes", "Bytes of blocks held in pages", registry=self._registry
        ).set_function(lambda: (blocks.counts().sealed + blocks.counts().cached) * page_bytes)


class LeaseMetrics:
    """Of one ``LeaseTable``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.granted = Counter("epdserve_kvstore_leases_granted", "Leases granted", registry=registry)
        self.ended = Counter("epdserve_kvstore_leases_ended", "Leases ended", ["how"], registry=registry)

    @classmethod
    def unregistered(cls) -> LeaseMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def watch(self, held: Callable[[], int]) -> None:
        """Export the number of leases held. Call once per registry."""
        Gauge("epdserve_kvstore_leases", "Leases held", registry=self._registry).set_function(held)


class TransferMetrics:
    """Of one ``Transfer``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.transfers = Counter(
            "epdserve_kvstore_transfers", "Transfers that are over", ["outcome"], registry=registry
        )
        self.bytes = Counter("epdserve_kvstore_transfer_bytes", "Bytes read from peers", registry=registry)
        self.descriptors = Counter(
            "epdserve_kvstore_transfer_descriptors",
            "Descriptors posted, after joining neighbours",
            registry=registry,
        )
        self.seconds = Histogram(
            "epdserve_kvstore_transfer_seconds",
            "Time from posting a transfer to seeing its end",
            registry=registry,
            buckets=_TRANSFER_BUCKETS_S,
        )
        self.deadlines_missed = Counter(
            "epdserve_kvstore_transfer_deadlines_missed",
            "Waits that ended before their transfer",
            registry=registry,
        )

    @classmethod
    def unregistered(cls) -> TransferMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def watch(self, pending: Callable[[], int]) -> None:
        """Export the number of transfers that are not known to be over. Call once per registry."""
        Gauge(
            "epdserve_kvstore_transfers_pending", "Transfers not over", registry=self._registry
        ).set_function(pending)


class SlotMetrics:
    """Of slot pools; ``pool`` is one of a worker's few fixed names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._slots = Gauge("epdserve_kvstore_slots", "Slots by state", ["pool", "state"], registry=registry)

    def watch(self, pool: str, counts: Callable[[], _HasStates]) -> None:
        """Export one pool; ``counts`` is its ``SlotPool.counts``."""
        for state in ("free", "held", "quarantined"):
            self._slots.labels(pool=pool, state=state).set_function(partial(_slots_in, counts, state))


def _pages_in(blocks: _HasPages, phase: str) -> int:
    return int(getattr(blocks.counts(), phase))


def _slots_in(counts: Callable[[], _HasStates], state: str) -> int:
    return int(getattr(counts(), state))
