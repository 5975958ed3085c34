"""Metrics of grammars. Every name has a row in services/grammar/README.md."""

from collections.abc import Iterable
from dataclasses import asdict

from epdserve.services.decode.grammar import Constraints
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class GrammarCollector(Collector):
    """Reads what the constraints of one worker count, at scrape time."""

    def __init__(self, constraints: Constraints, registry: CollectorRegistry) -> None:
        self._constraints = constraints
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """All samples."""
        counts = CounterMetricFamily(
            "epdserve_grammar_cache", "What became of grammars that were asked for", labels=["outcome"]
        )
        for outcome, count in asdict(self._constraints.counts).items():
            counts.add_metric([outcome], count)
        yield counts
        yield GaugeMetricFamily(
            "epdserve_grammar_cached", "Compiled grammars that are kept", value=self._constraints.cached
        )
        yield GaugeMetricFamily(
            "epdserve_grammar_waiting",
            "Requests that wait for their grammar",
            value=self._constraints.compiling,
        )
