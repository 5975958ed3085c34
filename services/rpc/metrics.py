"""Metrics of the decode streams, read from the objects themselves at scrape time. README.md has a row for each."""

from __future__ import annotations

from collections.abc import Iterator

from epdserve.services.rpc.decode_server import DecodeSessions
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class DecodeSessionsCollector(Collector):
    """Of a decode worker's ``DecodeSessions``; registers itself."""

    def __init__(self, sessions: DecodeSessions, registry: CollectorRegistry) -> None:
        self._sessions = sessions
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The figures of this moment."""
        counts = self._sessions.counts
        yield _counter("epdserve_rpc_decode_streams", "Streams opened by routers", counts.streams_opened)
        yield _counter("epdserve_rpc_decode_replays", "Requests asked for again", counts.replays)
        yield _counter("epdserve_rpc_decode_frames", "Frames sent", counts.frames_sent)
        yield _counter("epdserve_rpc_decode_tokens", "Tokens sent, replays included", counts.tokens_sent)
        yield _counter("epdserve_rpc_decode_chunks_ignored", "Chunks nobody wanted", counts.chunks_ignored)
        cancelled = CounterMetricFamily(
            "epdserve_rpc_decode_cancelled", "Requests cancelled by the worker's side", labels=["reason"]
        )
        cancelled.add_metric(["orphan"], counts.orphans_cancelled)
        cancelled.add_metric(["unread"], counts.unread_cancelled)
        yield cancelled
        yield _gauge("epdserve_rpc_decode_kept_tokens", "Unacknowledged tokens", self._sessions.kept_tokens())
        yield _gauge("epdserve_rpc_decode_running_requests", "Requests not ended", self._sessions.running())
        oldest_s = self._sessions.oldest_unacknowledged_s()
        yield _gauge("epdserve_rpc_decode_oldest_end_s", "Age of the oldest unacknowledged end", oldest_s)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
