"""Every metric of the package: it moves, it is in the README, and its name follows the rule."""

import re
from collections.abc import Callable
from pathlib import Path

import epdserve.kvstore.metrics as metrics_module
import pytest
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.errors import OutOfPages
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.metrics import BlockMetrics, LeaseMetrics, SlotMetrics, TransferMetrics
from epdserve.kvstore.slots import SlotPool
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.kvstore.types import BlockHash, MemoryRegion
from prometheus_client import CollectorRegistry
from support.manual_clock import ManualClock

A, B = BlockHash(b"a" * 16), BlockHash(b"b" * 16)
README = Path(metrics_module.__file__).with_name("README.md")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def value(registry: CollectorRegistry) -> Callable[..., float | None]:
    def read(noun: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"epdserve_kvstore_{noun}", labels)

    return read


def test_block_metrics_tell_hits_misses_bytes_and_evictions_by_reason(
    registry: CollectorRegistry, value: Callable[..., float | None]
) -> None:
    clock = ManualClock()
    metrics = BlockMetrics(registry)
    blocks = BlockManager(2, clock, metrics=metrics)
    metrics.watch(blocks, page_bytes=4096)
    (page,) = blocks.reserve(1)
    blocks.seal(page, A, parent=None, exact=False, checksum=0)
    blocks.match([A, B], exact=False)
    (other,) = blocks.reserve(1)
    blocks.seal(other, A, parent=None, exact=False, checksum=0)
    assert value("page_cache_blocks_total", result="hit") == 1
    assert value("page_cache_blocks_total", result="miss") == 1
    assert value("blocks_sealed_total", result="new") == 1
    assert value("blocks_sealed_total", result="duplicate") == 1
    assert value("page_cache_bytes") == 4096
    with pytest.raises(OutOfPages):
        blocks.reserve(2)
    assert value("reservations_refused_total") == 1
    (better,) = blocks.reserve(1)
    blocks.seal(better, A, parent=None, exact=True, checksum=0)
    assert value("page_cache_evictions_total", reason="replaced_by_exact") == 1
    blocks.release([page] * 3 + [better])
    clock.advance(10.0)
    blocks.quarantine(blocks.reserve(2)[:1])
    assert value("page_cache_evictions_total", reason="space") == 1
    assert value("evicted_idle_seconds_sum") == 10.0
    phases = {
        phase: value("pages", phase=phase) for phase in ("free", "filling", "sealed", "cached", "quarantined")
    }
    assert phases == {"free": 0, "filling": 1, "sealed": 0, "cached": 0, "quarantined": 1}
    assert value("page_capacity_pages") == 2
    assert value("pages_missing") == 0


def test_lease_metrics_tell_how_leases_ended(
    registry: CollectorRegistry, value: Callable[..., float | None]
) -> None:
    clock = ManualClock()
    metrics = LeaseMetrics(registry)
    leases = LeaseTable(clock, metrics=metrics)
    metrics.watch(lambda: leases.counts().held)
    released, late, _ = (leases.grant(1.0, lambda: None) for _ in range(3))
    leases.end(released)
    assert value("leases") == 2
    clock.advance(1.0)
    leases.end(late)
    leases.expire()
    assert value("leases_granted_total") == 3
    assert {how: value("leases_ended_total", how=how) for how in ("released", "late", "expired")} == {
        "released": 1,
        "late": 1,
        "expired": 1,
    }
    assert value("leases") == 0


def test_transfer_metrics_tell_outcome_bytes_and_time(
    registry: CollectorRegistry, value: Callable[..., float | None]
) -> None:
    fabric = LocalFabric()
    source, target = bytearray(b"x" * 8), bytearray(8)
    metrics = TransferMetrics(registry)
    here, there = LocalTransfer(fabric, "here", metrics=metrics), LocalTransfer(fabric, "there")
    metrics.watch(here.pending)
    there.register(_region(source))
    here.register(_region(target))
    peer = here.connect(there.endpoint())
    here.read(peer, [Copy("bytes", 0, "bytes", 0, 4), Copy("bytes", 1, "bytes", 1, 4)])
    fabric.hold("there")
    late = here.read(peer, [Copy("bytes", 0, "bytes", 0, 4)])
    late.wait(0.0)
    assert value("transfers_pending") == 1
    assert value("transfer_deadlines_missed_total") == 1
    fabric.resume("there")
    fabric.cut("there")
    here.progress()
    assert value("transfers_total", outcome="done") == 1
    assert value("transfers_total", outcome="failed") == 1
    assert value("transfer_bytes_total") == 8
    assert value("transfer_descriptors_total") == 2
    assert value("transfer_seconds_count") == 1
    assert target == source


def test_slot_metrics_tell_slots_by_state(
    registry: CollectorRegistry, value: Callable[..., float | None]
) -> None:
    pool = SlotPool(3)
    SlotMetrics(registry).watch("tails", pool.counts)
    pool.acquire()
    slot = pool.acquire()
    assert slot is not None
    pool.quarantine(slot)
    states = {state: value("slots", pool="tails", state=state) for state in ("free", "held", "quarantined")}
    assert states == {"free": 1, "held": 1, "quarantined": 1}


def test_every_metric_has_a_row_in_the_readme() -> None:
    sources = [file.read_text(encoding="utf-8") for file in README.parent.rglob("*.py")]
    names = set(re.findall(r'"(epdserve_kvstore_[a-z0-9_]+)"', "".join(sources)))
    rows = set(
        re.findall(r"^\| `(epdserve_kvstore_[a-z0-9_]+)`", README.read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert len(names) > 10
    assert {re.sub(r"_total$", "", row) for row in rows} == names


def _region(memory: bytearray) -> MemoryRegion:
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return MemoryRegion("bytes", address, 4, len(memory) // 4)
