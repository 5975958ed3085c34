"""What a worker exports, and that every name of it is explained."""

import re

import pytest
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.store_metrics import StoreMetrics
from epdserve.services.types import TokenSources
from prometheus_client import CollectorRegistry
from support.engine import PrefillBench
from support.repository import ROOT


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    EngineMetrics(registry).watch(PrefillBench().worker, leaked_pages=lambda: 0.0, step_age_s=lambda: 0.0)
    StoreMetrics(registry).watch(pending_bytes=lambda: 0.0, preparing=lambda: 0.0)
    return registry


def test_every_metric_has_a_row_in_the_readme(registry: CollectorRegistry) -> None:
    text = (ROOT / "services/engine/README.md").read_text()
    rows = set(re.findall(r"`([a-z_]+)`", text.partition("## Metrics")[2].partition("## Bounds")[0]))
    for family in registry.collect():
        name = family.name.removeprefix("epdserve_engine_")
        assert (f"{name}_total" if family.type == "counter" else name) in rows, family.name


def test_tokens_are_counted_by_where_they_came_from() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry).count_sources(TokenSources(device=8, ssd=16, computed=3))

    def value(source: str) -> float | None:
        return registry.get_sample_value("epdserve_engine_tokens_total", {"source": source})

    assert [value(source) for source in ("device", "ssd", "computed", "peer")] == [8, 16, 3, None]
