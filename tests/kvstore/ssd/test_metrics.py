"""What the tier counts and shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from epdserve.kvstore.ssd.metrics import SsdMetrics
from epdserve.kvstore.ssd.retention import Mode, RetentionPolicy
from prometheus_client import CollectorRegistry
from support.broken_disk import flip
from support.manual_clock import ManualClock
from support.ssd import SLOT, make_tier, name, put_of, read

POLICY = RetentionPolicy(
    floor_s=100, mode=Mode.BEST_EFFORT, reserve_ratio=0.0, low_free_ratio=0.3, high_free_ratio=0.3
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def value(registry: CollectorRegistry) -> Callable[..., float | None]:
    def read_value(noun: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"epdserve_kvstore_ssd_{noun}", labels)

    return read_value


def test_counters_and_gauges_tell_what_happened(
    tmp_path: Path, registry: CollectorRegistry, value: Callable[..., float | None]
) -> None:
    clock, metrics = ManualClock(), SsdMetrics(registry)
    tier = make_tier([tmp_path], slots=8, clock=clock, policy=POLICY, metrics=metrics)
    tier.open()
    metrics.watch(tier.figures)
    blocks = [name(number) for number in range(6)]
    tier.put_batch([put_of(block, exact=False) for block in blocks[:5]])
    clock.advance(50.0)
    assert tier.try_put(put_of(blocks[5])).value == "accepted"
    clock.advance(2.0)
    assert value("queue_blocks") == 1
    assert value("queue_oldest_seconds") == 2.0
    assert value("slots", state="writing") == 1
    tier.put_batch([put_of(blocks[0], exact=True)])
    assert value("puts_total", result="accepted") == 7
    assert value("stored_total", result="stored") == 6
    assert value("stored_total", result="replaced") == 1
    assert value("evictions_total", reason="replaced_by_exact") == 1
    assert value("written_bytes_total") == 7 * SLOT
    assert (value("live_bytes"), value("allocated_bytes")) == (6 * SLOT, 8 * SLOT)
    assert value("achieved_age_seconds") == 52
    read(tier, [blocks[1], name("none")])
    assert value("blocks_total", result="hit") == 1
    assert value("blocks_total", result="miss") == 1
    assert value("read_bytes_total") == SLOT
    assert value("batch_seconds_count", operation="read") == 1
    assert tier.sweep() == 1
    assert value("evictions_total", reason="space") == 1
    assert value("retention_violations_total") == 1
    assert value("evicted_idle_seconds_sum") == 52
    assert value("achieved_age_seconds") == 52
    flip(str(tmp_path / "slots-0000.dat"), SLOT)
    assert read(tier, [blocks[1]]) == [None]
    assert value("evictions_total", reason="corrupt") == 1
    assert value("slots", state="quarantined") == 1
    assert value("slots_missing") == 0
    assert (value("directories", state="serving"), value("directories", state="failed")) == (1, 0)
    tier.close()
