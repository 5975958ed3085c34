"""Prometheus metrics of what a machine's store keeps in host memory. Every name has a row in the package's README."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BLOCK_AGE_BUCKETS_S: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_TAIL_AGE_BUCKETS_S: Final = (1, 5, 15, 30, 60, 120, 180, 300, 600, 1800)
BLOCK_EVICTIONS: Final = ("space", "replaced_by_exact", "corrupt", "deleted")
TAIL_EVICTIONS: Final = ("expired", "space", "replaced_by_exact", "deleted")


class HostCacheMetrics:
    """Of one ``HostCache``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        lookups = Counter(
            "epdserve_kvstore_host_cache_blocks",
            "Blocks looked up in host memory",
            ["result"],
            registry=registry,
        )
        self._hit, self._miss = (lookups.labels(result=result) for result in ("hit", "miss"))
        puts = Counter(
            "epdserve_kvstore_host_cache_puts",
            "Blocks offered to the host cache",
            ["result"],
            registry=registry,
        )
        self.put_new, self.put_again, self.put_corrupt, self.put_refused = (
            puts.labels(result=result) for result in ("new", "duplicate", "corrupt", "refused")
        )
        evictions = Counter(
            "epdserve_kvstore_host_cache_evictions",
            "Blocks that left the host cache",
            ["reason"],
            registry=registry,
        )
        self.evicted = {reason: evictions.labels(reason=reason) for reason in BLOCK_EVICTIONS}
        self._ages = Histogram(
            "epdserve_kvstore_host_cache_evicted_idle_seconds",
            "Time since last use of blocks evicted for space",
            registry=registry,
            buckets=_BLOCK_AGE_BUCKETS_S,
        )

    @classmethod
    def unregistered(cls) -> HostCacheMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def looked_up(self, *, hits: int, misses: int) -> None:
        """Blocks were asked for."""
        if hits:
            self._hit.inc(hits)
        if misses:
            self._miss.inc(misses)

    def made_room(self, idle_s: Sequence[float]) -> None:
        """Blocks went for space; how long each had been idle."""
        self.evicted["space"].inc(len(idle_s))
        for seconds in idle_s:
            self._ages.observe(seconds)

    def watch(self, *, held_bytes: Callable[[], int], pinned: Callable[[], int]) -> None:
        """Export the gauges of one cache. Call once per registry."""
        Gauge(
            "epdserve_kvstore_host_cache_bytes", "Bytes of blocks in host memory", registry=self._registry
        ).set_function(held_bytes)
        Gauge(
            "epdserve_kvstore_host_cache_pinned_blocks",
            "Blocks of the host cache that are being read",
            registry=self._registry,
        ).set_function(pinned)


class SwaPoolMetrics:
    """Of one ``SwaPool``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        lookups = Counter(
            "epdserve_kvstore_tails", "Tails looked up in the SWA pool", ["result"], registry=registry
        )
        self.hit, self.miss, self.expired = (
            lookups.labels(result=result) for result in ("hit", "miss", "expired")
        )
        puts = Counter(
            "epdserve_kvstore_tail_puts", "Tails offered to the SWA pool", ["result"], registry=registry
        )
        self.put_new, self.put_again, self.put_refused = (
            puts.labels(result=result) for result in ("new", "duplicate", "refused")
        )
        evictions = Counter(
            "epdserve_kvstore_tail_evictions", "Tails that left the SWA pool", ["reason"], registry=registry
        )
        self.evicted = {reason: evictions.labels(reason=reason) for reason in TAIL_EVICTIONS}
        self.ages = Histogram(
            "epdserve_kvstore_tail_evicted_age_seconds",
            "Age of tails that went for space before their time",
            registry=registry,
            buckets=_TAIL_AGE_BUCKETS_S,
        )

    @classmethod
    def unregistered(cls) -> SwaPoolMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def watch(self, *, held_bytes: Callable[[], int], pinned: Callable[[], int]) -> None:
        """Export the gauges of one pool. Call once per registry."""
        Gauge(
            "epdserve_kvstore_tail_bytes", "Bytes of tails that can be found", registry=self._registry
        ).set_function(held_bytes)
        Gauge(
            "epdserve_kvstore_tails_pinned", "Tails that are being read", registry=self._registry
        ).set_function(pinned)


class TailDirectoryMetrics:
    """Of one ``TailDirectory``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "epdserve_kvstore_tail_directory_requests",
            "Requests to the directory of tails",
            ["request", "result"],
            registry=registry,
        )

    @classmethod
    def unregistered(cls) -> TailDirectoryMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def count(self, request: str, result: str) -> None:
        """Count one request: publish, find or withdraw; done, hit, miss, unreadable or failed."""
        self._requests.labels(request=request, result=result).inc()
