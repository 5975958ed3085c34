"""Prometheus metrics of what a worker does with its machine's store. Every name has a row in this folder's README."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class StoreMetrics:
    """Of one worker. Counters may be fed from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.offloads = Counter(
            "epdserve_engine_offloaded_blocks",
            "Sealed blocks by what became of their offer to the store",
            ["outcome"],
            registry=registry,
        )
        self.tail_offloads = Counter(
            "epdserve_engine_offloaded_tails",
            "Tails by what became of their offer to the store",
            ["outcome"],
            registry=registry,
        )
        self.fetches = Counter(
            "epdserve_engine_fetches",
            "Portions of blocks read from the store",
            ["outcome"],
            registry=registry,
        )
        self.fetched_blocks = Counter(
            "epdserve_engine_fetched_blocks", "Blocks from the store by tier", ["tier"], registry=registry
        )
        self.tails = Counter(
            "epdserve_engine_tails",
            "Tails looked for when a prompt came, by outcome",
            ["outcome"],
            registry=registry,
        )
        self.prepare_seconds = Histogram(
            "epdserve_engine_prepare_seconds",
            "Time to bring up what the store has of a prompt",
            registry=registry,
            buckets=_BUCKETS_S,
        )

    @classmethod
    def unregistered(cls) -> "StoreMetrics":
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def watch(self, *, pending_bytes: Callable[[], float], preparing: Callable[[], float]) -> None:
        """Export the gauges. Call once per registry."""
        for name, help_text, read in (
            ("offload_pending_bytes", "Bytes on their way to the store; their pages are held", pending_bytes),
            ("preparing_requests", "Requests whose blocks are being brought up", preparing),
        ):
            gauge = Gauge(f"epdserve_engine_{name}", help_text, registry=self._registry)
            gauge.set_function(read)
