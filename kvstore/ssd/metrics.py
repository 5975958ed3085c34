"""Prometheus metrics of the SSD tier. Every name has a row in the package's README."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from epdserve.kvstore.ssd.retention import Admission
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_AGE_BUCKETS_S = (60, 600, 3600, 6 * 3600, 24 * 3600, 48 * 3600, 72 * 3600, 96 * 3600, 7 * 24 * 3600)
_BATCH_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STATES = ("free", "writing", "live", "leaving", "quarantined")


class SsdFigures(Protocol):
    """What gauges read, at scrape time; the gauges without labels read methods of their own names."""

    def slots(self, state: str) -> int:
        """Slots of serving directories in a state."""

    def directories(self, state: str) -> int:
        """Directories that serve, or failed."""


class SsdMetrics:
    """Of one ``SsdTier``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        counter = partial(Counter, registry=registry)
        self.reads = counter("epdserve_kvstore_ssd_blocks", "Blocks asked for", ["result"])
        self.puts = counter("epdserve_kvstore_ssd_puts", "Blocks offered", ["result"])
        self._puts_by = {result: self.puts.labels(result=result.value) for result in Admission}
        self.stored = counter("epdserve_kvstore_ssd_stored", "Accepted blocks by outcome", ["result"])
        self.evictions = counter("epdserve_kvstore_ssd_evictions", "Blocks that left", ["reason"])
        self.violations = counter(
            "epdserve_kvstore_ssd_retention_violations", "Blocks evicted younger than the floor"
        )
        self.io_errors = counter("epdserve_kvstore_ssd_io_errors", "Failed system calls", ["operation"])
        self.read_bytes = counter("epdserve_kvstore_ssd_read_bytes", "Bytes read and verified")
        self.written_bytes = counter("epdserve_kvstore_ssd_written_bytes", "Bytes of records written")
        self.idle = Histogram(
            "epdserve_kvstore_ssd_evicted_idle_seconds",
            "Time since last use of blocks evicted for space or quota",
            buckets=_AGE_BUCKETS_S,
            registry=registry,
        )
        self.batch_seconds = Histogram(
            "epdserve_kvstore_ssd_batch_seconds",
            "Duration of one batch",
            ["operation"],
            buckets=_BATCH_BUCKETS_S,
            registry=registry,
        )

    @classmethod
    def unregistered(cls) -> SsdMetrics:
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def offered(self, results: Iterable[Admission]) -> None:
        """Blocks were let in or not. On the way of every put, so labels are looked up beforehand."""
        for result, count in Tally(results).items():
            self._puts_by[result].inc(count)

    def took_up(self, *, stored: int, replaced: int) -> None:
        """Accepted blocks are found from now on, some of them in place of a tainted one."""
        self.stored.labels(result="stored").inc(stored)
        self.stored.labels(result="replaced").inc(replaced)
        self.evictions.labels(reason="replaced_by_exact").inc(replaced)

    def evicted(self, reason: str, idle_s: Sequence[int], violations: int) -> None:
        """Blocks went for space or quota; how long each had been idle."""
        self.evictions.labels(reason=reason).inc(len(idle_s))
        self.violations.inc(violations)
        for seconds in idle_s:
            self.idle.observe(seconds)

    def watch(self, figures: SsdFigures) -> None:
        """Export the gauges of one tier. Call once per registry."""
        slots = Gauge("epdserve_kvstore_ssd_slots", "Slots by state", ["state"], registry=self._registry)
        for state in _STATES:
            slots.labels(state=state).set_function(partial(figures.slots, state))
        directories = Gauge(
            "epdserve_kvstore_ssd_directories", "Drives by state", ["state"], registry=self._registry
        )
        for state in ("serving", "failed"):
            directories.labels(state=state).set_function(partial(figures.directories, state))
        for name, text in (
            ("epdserve_kvstore_ssd_slots_missing", "Slots in no state; not 0 means a bug"),
            ("epdserve_kvstore_ssd_allocated_bytes", "Bytes set aside on disk"),
            ("epdserve_kvstore_ssd_live_bytes", "Bytes of stored records"),
            ("epdserve_kvstore_ssd_reserve_used_slots", "Slots taken over the reserve"),
            ("epdserve_kvstore_ssd_queue_blocks", "Blocks accepted and not yet stored"),
            ("epdserve_kvstore_ssd_queue_oldest_seconds", "How long the oldest of them waits"),
            ("epdserve_kvstore_ssd_achieved_age_seconds", "Idle time up to which blocks are really kept"),
        ):
            short = name.partition("_ssd_")[2]
            Gauge(name, text, registry=self._registry).set_function(getattr(figures, short))
