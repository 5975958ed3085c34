"""Metrics of the gate, read at scrape time. No label is taken from a client: series are bounded."""

from __future__ import annotations

from collections.abc import Iterator

from epdserve.services.router.tenancy.gate import TenantGate
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class GateCollector(Collector):
    """Of one router's gate; registers itself."""

    def __init__(self, gate: TenantGate, registry: CollectorRegistry) -> None:
        self._gate = gate
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        counts = self._gate.counts
        refused = CounterMetricFamily(
            "epdserve_router_tenant_refusals", "Requests over a limit of their tenant", labels=["limit"]
        )
        refused.add_metric(["requests"], counts.refused_requests)
        refused.add_metric(["tokens"], counts.refused_tokens)
        refused.add_metric(["concurrent"], counts.refused_concurrent)
        yield refused
        yield CounterMetricFamily(
            "epdserve_router_tenant_local",
            "Requests whose limits were counted by this router alone",
            value=counts.without_redis,
        )
        yield CounterMetricFamily(
            "epdserve_router_tenant_reload_failures",
            "Times that keys and limits could not be read again",
            value=self._gate.directory.failures,
        )
        yield GaugeMetricFamily(
            "epdserve_router_tenants", "Tenants with keys", value=len(self._gate.directory.tenants)
        )
