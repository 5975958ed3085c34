"""Prometheus metrics of a worker with a model. Every name has a row in this folder's README."""

from collections.abc import Callable
from typing import Protocol

from epdserve.services.types import TokenSources
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_STAGE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class EngineWorker(Protocol):
    """What a step loop runs, and what others ask about it from their threads."""

    @property
    def queued_tokens(self) -> int:
        """Tokens of work that waits."""

    @property
    def idle(self) -> bool:
        """Whether no request is here."""

    @property
    def waiting(self) -> int:
        """Requests that wait for a place."""

    @property
    def running(self) -> int:
        """Requests in the step loop."""

    @property
    def active(self) -> int:
        """Requests that have a place, those among them whose KV is still on its way."""

    @property
    def swapped_bytes(self) -> int:
        """Host memory that holds preempted requests."""

    @property
    def max_context_tokens(self) -> int:
        """Longest request that is taken."""

    def oldest_waiting_s(self) -> float:
        """How long the first request in the queue has waited."""

    def step(self) -> bool:
        """One step; whether there may be more to do at once."""


class EngineMetrics:
    """Of one step loop. Counters are fed by the workers, gauges read at scrape time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.step_seconds = Histogram(
            "epdserve_engine_step_seconds", "Time of one step", registry=registry, buckets=_STEP_BUCKETS_S
        )
        self.rows = Counter("epdserve_engine_rows", "Rows run through the model", ["kind"], registry=registry)
        self.requests = Counter(
            "epdserve_engine_requests", "Requests that ended", ["outcome"], registry=registry
        )
        self.stage_seconds = Histogram(
            "epdserve_engine_stage_seconds",
            "Time of a request in a stage",
            ["stage"],
            registry=registry,
            buckets=_STAGE_BUCKETS_S,
        )
        self.tokens = Counter(
            "epdserve_engine_tokens",
            "Prompt tokens by where their KV came from, and tokens sampled",
            ["source"],
            registry=registry,
        )
        self.handoffs = Counter(
            "epdserve_engine_handoffs", "Hand-offs by how they ended", ["outcome"], registry=registry
        )
        self.preemptions = Counter(
            "epdserve_engine_preemptions", "Requests moved out of the batch", ["how"], registry=registry
        )

    def count_sources(self, sources: TokenSources) -> None:
        """Count a prompt's tokens by where their KV came from."""
        for name, count in sources.by_name():
            self.tokens.labels(source=name).inc(count)

    @classmethod
    def unregistered(cls) -> "EngineMetrics":
        """Metrics nobody scrapes."""
        return cls(CollectorRegistry())

    def watch(
        self, worker: EngineWorker, *, leaked_pages: Callable[[], float], step_age_s: Callable[[], float]
    ) -> None:
        """Export the gauges of one worker. Call once per registry."""
        for name, help_text, read in (
            (
                "leaked_pages",
                "Pages and slots held while the worker is idle; not 0 means a bug",
                leaked_pages,
            ),
            ("step_age_seconds", "Age of the running step, 0 between steps", step_age_s),
            ("waiting_requests", "Requests that wait for a place", lambda: worker.waiting),
            ("running_requests", "Requests in the step loop", lambda: worker.running),
            ("oldest_waiting_seconds", "Age of the request that waits longest", worker.oldest_waiting_s),
            ("swapped_bytes", "Host memory that holds preempted requests", lambda: worker.swapped_bytes),
        ):
            gauge = Gauge(f"epdserve_engine_{name}", help_text, registry=self._registry)
            gauge.set_function(read)
