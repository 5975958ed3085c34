"""A read that misses its deadline: its slot has no new owner before the transfer is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.lending_cache import LendingCache
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.transfer_thread import ReadOutcome, TransferThread
from epdserve.services.store.pulls import Puller
from support.waiting import until

PAGE = 4096


class Wire:
    """A source and a store's slots, with a network that can be held up."""

    def __init__(self) -> None:
        self.fabric = LocalFabric()
        self.source = StagingPool("pages", slot_bytes=PAGE, count=2)
        peer = LocalTransfer(self.fabric, "worker")
        peer.register(self.source.region)
        self.endpoint: Endpoint = peer.endpoint()
        self.slots = StagingPool("blocks", slot_bytes=PAGE, count=2)
        self.cache = LendingCache(self.slots)
        transfer = LocalTransfer(self.fabric, "store")
        transfer.register(self.slots.region)
        self.thread = TransferThread(transfer, clock=SystemClock(), max_pending=2)
        self.thread.start()
        self.puller = Puller(self.thread)

    async def fill(self, *, places: tuple[int, ...] = (0, 1), deadline_s: float = 5.0) -> ReadOutcome:
        slots = [self.cache.reserve() for _ in places]
        self.taken = [slot for slot in slots if slot is not None]
        return await self.puller.fill(
            self.endpoint,
            "pages",
            places,
            self.taken,
            into="blocks",
            owner=self.cache,
            nbytes=PAGE,
            deadline_s=deadline_s,
        )


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    await asyncio.to_thread(wire.thread.stop, timeout_s=5.0)
    wire.cache.check()


async def test_what_was_read_is_the_callers(wire: Wire) -> None:
    slot = wire.source.acquire()
    assert slot is not None
    wire.source.bytes_of(slot)[:] = 7
    assert await wire.fill(places=(slot.index,)) is ReadOutcome.DONE
    assert np.all(wire.slots.bytes_of(wire.taken[0]) == 7)
    wire.cache.abort(wire.taken[0])


async def test_a_late_read_quarantines_its_slots_until_it_is_over(wire: Wire) -> None:
    wire.fabric.hold("worker")
    assert await wire.fill(deadline_s=0.05) is ReadOutcome.LATE
    assert wire.slots.counts().quarantined == 2
    assert wire.cache.reserve() is None
    wire.fabric.resume("worker")
    await until(lambda: wire.slots.counts().free == 2)


async def test_a_read_that_fails_or_is_refused_frees_its_slots(wire: Wire) -> None:
    assert await wire.fill(places=(0, 99)) is ReadOutcome.FAILED
    assert wire.slots.counts().free == 2
    wire.fabric.cut("worker")
    assert await wire.fill() is ReadOutcome.FAILED
    assert wire.slots.counts().free == 2
    wire.thread.stop(timeout_s=5.0)
    assert await wire.fill() is ReadOutcome.FAILED
    assert wire.slots.counts().free == 2


async def test_stopping_ends_a_read_that_hangs(wire: Wire) -> None:
    wire.fabric.hold("worker")
    late = asyncio.create_task(wire.fill(deadline_s=60.0))
    await until(lambda: wire.thread.outstanding == 1)
    await asyncio.to_thread(wire.thread.stop, timeout_s=5.0)
    assert await late is ReadOutcome.FAILED
    assert wire.slots.counts().free == 2
