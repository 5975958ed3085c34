"""Counters and histograms of the router; README.md has a row for each. Labels come from closed sets only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from epdserve.services.router.memo import Kept
from epdserve.services.types import TokenSources
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

_FAST_S: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
_SLOW_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS: Final = (16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)

OUTCOMES: Final = (
    "ok",
    "invalid_request",
    "unauthenticated",
    "model_not_found",
    "payload_too_large",
    "overloaded",
    "cancelled",
    "internal",
    "unavailable",
    "deadline_exceeded",
)
_EFFORTS: Final = tuple(range(10, 101, 10))  # also the levels: 50, 75 falls into 80, 100
# Codes of workers' errors that are told apart in logs, not in series
_FOLDED: Final = {"draining": "unavailable", "worker_lost": "unavailable", "lease_lost": "unavailable"}


class LoopCounter(Collector):
    """A counter, or one a value of its label, at a tenth of the library's price: a request feeds several.

    Fed and collected on one event loop, so it takes no lock.

    Args:
        labels: None, or one. values: All that the label can have.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str] = (), values: Sequence[str] = ("",)
    ) -> None:
        self._name, self._documentation, self._labels = name, documentation, labels
        self._counts = dict.fromkeys(values, 0.0)

    def inc(self, amount: float = 1.0, *, of: str = "") -> None:
        """Count; ``of`` is one of the label's values."""
        self._counts[of] += amount

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The form that Prometheus reads."""
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for value, count in self._counts.items():
            family.add_metric([value] if self._labels else [], count)
        yield family


class LoopHistogram(Collector):
    """A histogram at a tenth of the library's price: one is fed once a token batch, others once a request.

    Observed and collected on one event loop, so it takes no lock.
    """

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The cumulative form that Prometheus reads."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], buckets, self._sum)
        yield family


class RouterMetrics:
    """Metrics of one router process in a registry of their own.

    Attributes:
        in_flight: Requests inside.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        r, histogram, counter = self.registry, self._histogram, self._counter
        self._requests = counter(
            "epdserve_router_requests", "Finished requests by outcome", ["outcome"], OUTCOMES
        )
        self.in_flight = 0
        gauge = Gauge("epdserve_router_in_flight_requests", "Requests inside", registry=r)
        gauge.set_function(lambda: self.in_flight)
        self.prompt_tokens = counter("epdserve_router_prompt_tokens", "Prompt tokens")
        self.cached_tokens = counter("epdserve_router_cached_tokens", "Prompt tokens found in caches")
        self.completion_tokens = counter("epdserve_router_completion_tokens", "Sampled tokens")
        self.reasoning_tokens = counter("epdserve_router_reasoning_tokens", "Of these, reasoning")
        self.events = counter("epdserve_router_stream_events", "Writes to streams; tokens share them")
        self.turns = Counter(
            "epdserve_router_turns",
            "Parts of earlier answers in prompts, by what the router remembered of them",
            ["memo"],
            registry=r,
        )
        self.answers_kept = Counter(
            "epdserve_router_answers_kept",
            "Parts of delivered answers by what is remembered of them",
            ["ids"],
            registry=r,
        )
        self.prefix_tokens = Counter(
            "epdserve_router_prefix_tokens",
            "Prompt tokens by where their KV came from",
            ["source"],
            registry=r,
        )
        self.unknown_fields = Counter("epdserve_router_unknown_fields", "Body fields ignored", registry=r)
        self.retries = Counter(
            "epdserve_router_retries", "Prefills repeated before the first token", registry=r
        )
        self.resumes = Counter("epdserve_router_resumes", "Streams continued on another worker", registry=r)
        self.handovers = Counter(
            "epdserve_router_handovers", "Requests that a draining worker sent elsewhere", registry=r
        )
        self.empty_answers = Counter(
            "epdserve_router_empty_answers", "Answers that stopped without content and calls", registry=r
        )
        self.invalid_calls = Counter(
            "epdserve_router_invalid_calls", "Tool calls whose arguments were no JSON object", registry=r
        )
        self.prompt_size = histogram("epdserve_router_prompt_size_tokens", "Prompt length", _TOKENS)
        self.prepare = histogram("epdserve_router_prepare_seconds", "Body read to prefill sent", _FAST_S)
        self.effort_asked = histogram(
            "epdserve_router_effort_asked", "Effort that requests asked for", _EFFORTS
        )
        self.effort_granted = histogram(
            "epdserve_router_effort_granted", "Effort that they ran with", _EFFORTS
        )
        self.ttft = histogram(
            "epdserve_router_time_to_first_token_seconds", "Request to first token", _SLOW_S
        )
        self.itl = histogram(
            "epdserve_router_inter_token_seconds", "Time between token batches of a stream", _FAST_S
        )
        self.e2e = histogram("epdserve_router_request_seconds", "Request to last token", _SLOW_S)

    def _counter(
        self, name: str, documentation: str, labels: Sequence[str] = (), values: Sequence[str] = ("",)
    ) -> LoopCounter:
        made = LoopCounter(name, documentation, labels, values)
        self.registry.register(made)
        return made

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> LoopHistogram:
        made = LoopHistogram(name, documentation, buckets)
        self.registry.register(made)
        return made

    def kept(self, what: Sequence[Kept]) -> None:
        """Count what is remembered of an answer."""
        for each in what:
            self.answers_kept.labels(ids=each.value).inc()

    def count_sources(self, sources: TokenSources) -> None:
        """Count a prompt's tokens by where their KV came from."""
        for name, count in sources.by_name():
            if count:
                self.prefix_tokens.labels(source=name).inc(count)

    def finished(self, code: str) -> None:
        """Count a request by how it ended: ``ok`` or an error's code."""
        outcome = _FOLDED.get(code, code)
        self._requests.inc(of=outcome if outcome in OUTCOMES else "internal")
