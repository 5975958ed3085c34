import time
from collections.abc import Iterator

import numpy as np
import pytest
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.kvstore.types import Endpoint, MemoryRegion
from epdserve.services.engine.transfer_thread import ReadOutcome, TransferThread
from epdserve.services.errors import Overloaded, Unavailable
from support.engine import eventually

STRIDE, COUNT = 64, 4


class Side:
    """One memory with its transfer."""

    def __init__(self, fabric: LocalFabric, name: str, fill: int) -> None:
        self.memory = np.full((COUNT, STRIDE), fill, dtype=np.uint8)
        self.transfer = LocalTransfer(fabric, name)
        self.transfer.register(MemoryRegion("m", self.memory.ctypes.data, STRIDE, COUNT))


class World:
    """A source, and a sink with its thread."""

    def __init__(self, **options: int) -> None:
        self.fabric = LocalFabric()
        self.source, self.sink = Side(self.fabric, "source", 7), Side(self.fabric, "sink", 0)
        self.thread = TransferThread(self.sink.transfer, clock=SystemClock(), **options)
        self.endpoint: Endpoint = self.source.transfer.endpoint()

    def copy(self, index: int, target: int | None = None) -> list[Copy]:
        return [Copy("m", index, "m", index if target is None else target, STRIDE)]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.thread.start()
    yield world
    world.thread.stop(timeout_s=5.0)


def test_read_brings_the_bytes(world: World) -> None:
    read = world.thread.read(world.endpoint, world.copy(1, 2), deadline_s=5.0)
    assert read.future.result(5) is ReadOutcome.DONE
    assert read.over
    assert world.sink.memory.sum(axis=1).tolist() == [0, 0, 7 * STRIDE, 0]


def test_region_that_the_peer_lacks_fails(world: World) -> None:
    for copies in (world.copy(COUNT), [Copy("nothing", 0, "m", 0, STRIDE)]):
        assert (
            world.thread.read(world.endpoint, copies, deadline_s=5.0).future.result(5) is ReadOutcome.FAILED
        )
    broken = Endpoint("source", b"\xff\xfe", world.endpoint.regions)
    assert world.thread.read(broken, world.copy(0), deadline_s=5.0).future.result(5) is ReadOutcome.FAILED


def test_dead_peer_fails(world: World) -> None:
    world.fabric.cut("source")
    assert (
        world.thread.read(world.endpoint, world.copy(0), deadline_s=5.0).future.result(5)
        is ReadOutcome.FAILED
    )


def test_late_read_is_told_at_its_deadline_and_over_when_it_is_over(world: World) -> None:
    world.fabric.hold("source")
    read = world.thread.read(world.endpoint, world.copy(3), deadline_s=0.02)
    assert read.future.result(5) is ReadOutcome.LATE
    over: list[bool] = []
    assert not world.thread.settle(read, lambda: over.append(True))
    assert world.thread.outstanding == 1
    other = world.thread.read(world.endpoint, [], deadline_s=5.0)
    time.sleep(0.01)
    assert not over
    world.fabric.resume("source")
    eventually(lambda: over == [True])
    assert world.sink.memory[3].tolist() == [7] * STRIDE  # the late bytes did land
    assert other.future.result(5) is ReadOutcome.DONE
    assert world.thread.settle(read, lambda: over.append(False))
    assert over == [True]


def test_waiter_that_goes_away_does_not_disturb_the_read(world: World) -> None:
    world.fabric.hold("source")
    read = world.thread.read(world.endpoint, world.copy(0), deadline_s=5.0)
    assert not read.future.cancel()
    world.fabric.resume("source")
    eventually(lambda: read.over)


def test_outstanding_reads_are_bounded() -> None:
    world = World(max_pending=1)
    world.fabric.hold("source")
    world.thread.start()
    world.thread.read(world.endpoint, world.copy(0), deadline_s=0.01)
    with pytest.raises(Overloaded):
        world.thread.read(world.endpoint, world.copy(1), deadline_s=0.01)
    world.thread.stop(timeout_s=5.0)


def test_stop_ends_late_reads_and_their_quarantine() -> None:
    world = World()
    world.fabric.hold("source")
    world.thread.start()
    read = world.thread.read(world.endpoint, world.copy(0), deadline_s=0.01)
    assert read.future.result(5) is ReadOutcome.LATE
    over: list[bool] = []
    world.thread.settle(read, lambda: over.append(True))
    world.thread.stop(timeout_s=5.0)
    assert over == [True]
    with pytest.raises(Unavailable):
        world.thread.read(world.endpoint, world.copy(0), deadline_s=1.0)


def test_idle_thread_polls_only_while_it_serves() -> None:
    calls = 0
    serving = True
    world = World()

    class Counting:
        def progress(self) -> None:
            nonlocal calls
            calls += 1

        def close(self) -> None:
            return None

    thread = TransferThread(Counting(), clock=SystemClock(), serves=lambda: serving)  # type: ignore[arg-type]
    thread.start()
    thread.wake()
    eventually(lambda: calls > 3)
    serving = False
    time.sleep(0.02)
    before = calls
    time.sleep(0.03)
    assert calls == before
    serving = True
    thread.wake()
    eventually(lambda: calls > before)
    thread.stop(timeout_s=5.0)
    world.thread.start()
    world.thread.stop(timeout_s=5.0)
