"""What the router knows of its workers, read when Prometheus asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from epdserve.services.router.rpc_cluster import RpcCluster
from epdserve.services.types import WorkerRole, WorkerState
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

# Without an answer yet there is no age; a day is long enough for any alert
_NEVER_S: Final = 86_400.0


class ClusterCollector(Collector):
    """Collects from a cluster on the event loop that owns it: ``/metrics`` is answered there."""

    def __init__(self, cluster: RpcCluster) -> None:
        self._cluster = cluster

    def collect(self) -> Iterable[Metric]:
        """One sample each; labels from closed sets."""
        workers = GaugeMetricFamily(
            "epdserve_router_workers", "Workers in the view", labels=["role", "state"]
        )
        counts = Counter((info.role, info.state) for info in self._cluster.workers())
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            for state in WorkerState:
                workers.add_metric([role.value, state.value], counts[role, state])
        yield workers
        index = self._cluster.index_counts()
        yield GaugeMetricFamily(
            "epdserve_router_block_index_blocks", "Blocks known to be somewhere", value=index.hashes
        )
        yield CounterMetricFamily(
            "epdserve_router_block_index_events", "Block events applied", value=index.events
        )
        yield CounterMetricFamily(
            "epdserve_router_block_index_snapshots", "Block snapshots loaded", value=index.snapshots
        )
        yield CounterMetricFamily(
            "epdserve_router_block_index_drifts",
            "Workers whose blocks were not those known, by their digest",
            value=self._cluster.drifts,
        )
        yield CounterMetricFamily(
            "epdserve_router_index_lookups", "Prompts looked up", value=self._cluster.lookups
        )
        yield CounterMetricFamily(
            "epdserve_router_blind_lookups",
            "Of these, while some worker's blocks were not known yet",
            value=self._cluster.blind_lookups,
        )
        yield CounterMetricFamily(
            "epdserve_router_decode_reconnects",
            "Broken streams to decode workers",
            value=self._cluster.reconnects(),
        )
        yield GaugeMetricFamily(
            "epdserve_router_registry_age_seconds",
            "Since the registry last answered",
            value=min(self._cluster.view_age_s(), _NEVER_S),
        )
