"""What the policies know and how well they did, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterable

from epdserve.services.router.estimates import Estimates
from epdserve.services.router.foresight import Foresight
from epdserve.services.router.sharing import Sharing
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class PolicyCollector(Collector):
    """Collects on the event loop that owns the estimates."""

    def __init__(
        self,
        estimates: Estimates,
        foresight: Foresight,
        sharing: Sharing | None,
        registry: CollectorRegistry,
    ) -> None:
        self._estimates = estimates
        self._foresight = foresight
        self._sharing = sharing
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One sample each."""
        lengths, hits = self._estimates.lengths, self._estimates.hits
        fared = lengths.calibration
        yield _counter("length_answers", "Answers whose length was forecast", fared.answers)
        yield _counter("length_covered", "Of these, inside the interval meant for 80 %", fared.covered)
        yield _gauge("length_coverage_ratio", "Share inside the interval lately", fared.recent_coverage)
        yield _gauge("length_bias_octaves", "Mean log2 of length over forecast median lately", fared.bias)
        share = self._estimates.request_share
        yield _gauge("decode_request_ratio", "What a request adds to a decode step, as a share of it", share)
        yield _gauge("length_cells", "Cells of the length model", lengths.cells)
        yield _counter("expected_hit_tokens", "Prompt tokens expected to be cached", hits.expected_tokens)
        yield _counter("missed_hit_tokens", "Of these, not found there", hits.missed_tokens)
        yield _gauge(
            "index_stale_ratio", "Of these, as a share", hits.missed_tokens / max(1, hits.expected_tokens)
        )
        yield _counter("placed_prefills", "Prefills that came back", hits.prefills)
        yield _gauge(
            "misroute_ratio", "Share with less cached than expected", hits.misrouted / max(1, hits.prefills)
        )
        late = CounterMetricFamily(
            "epdserve_router_refused_early",
            "Refused before work was spent on them, by reason",
            labels=["reason"],
        )
        for reason, count in self._foresight.refused.items():
            late.add_metric([reason], count)
        yield late
        off = GaugeMetricFamily(
            "epdserve_router_outlook_ratio",
            "Time seen over time expected at the gate, lately, by what it was",
            labels=["what"],
        )
        hindsight = self._foresight.hindsight
        for what, ratio in (("ttft", hindsight.ttft), ("tpot", hindsight.tpot)):
            off.add_metric([what], ratio)
        yield off
        yield _counter("efforts_lowered", "Let in at their effort floor", self._foresight.lowered)
        yield _gauge("metered_tenants", "Tenants whose shares are counted", len(self._foresight.meter))
        if self._sharing is not None:
            yield _counter("sharing_failures", "Exchanges that Redis did not answer", self._sharing.failures)
            yield _counter(
                "sharing_unreadable", "Other routers' words that were none", self._sharing.unreadable
            )


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"epdserve_router_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"epdserve_router_{name}", text, value=value)
