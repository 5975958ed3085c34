import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from epdserve.kvstore.errors import SlotNotHeld
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import PAGE_BYTES, StagingPool
from epdserve.kvstore.transfer.base import Copy, TransferState
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer


def held(pool: StagingPool) -> Slot:
    slot = pool.acquire()
    assert slot is not None
    return slot


def test_slots_are_aligned_and_apart() -> None:
    pool = StagingPool("s", slot_bytes=2 * PAGE_BYTES, count=3)
    slots = [held(pool) for _ in range(3)]
    assert pool.acquire() is None
    for slot in slots:
        pool.bytes_of(slot)[:] = slot.index + 1
    for slot in slots:
        row = pool.bytes_of(slot)
        assert row.ctypes.data == pool.region.address + slot.index * pool.region.stride
        assert row.ctypes.data % PAGE_BYTES == 0
        assert len(row) == pool.slot_bytes
        assert set(row.tolist()) == {slot.index + 1}


@pytest.mark.parametrize(("slot_bytes", "count"), [(0, 1), (-4096, 1), (1000, 1), (4096, 0)])
def test_sizes_that_cannot_be_are_refused(slot_bytes: int, count: int) -> None:
    with pytest.raises(ValueError, match="4096"):
        StagingPool("s", slot_bytes=slot_bytes, count=count)


def test_who_gave_a_slot_back_does_not_get_at_it_again() -> None:
    pool = StagingPool("s", slot_bytes=PAGE_BYTES, count=1)
    old = held(pool)
    pool.release(old)
    new = held(pool)
    for do in (pool.bytes_of, pool.release, pool.quarantine, pool.transfer_over):
        with pytest.raises(SlotNotHeld):
            do(old)
    pool.bytes_of(new)
    for unknown in (Slot(1, 1), Slot(-1, 1)):
        with pytest.raises(SlotNotHeld):
            pool.bytes_of(unknown)
        with pytest.raises(SlotNotHeld):
            pool.release(unknown)
    pool.check()


def test_a_quarantined_slot_is_nobodys_until_its_transfer_is_over() -> None:
    pool = StagingPool("s", slot_bytes=PAGE_BYTES, count=1)
    slot = held(pool)
    pool.quarantine(slot)
    assert pool.acquire() is None
    with pytest.raises(SlotNotHeld):
        pool.bytes_of(slot)
    assert pool.counts().quarantined == 1
    pool.transfer_over(slot)
    assert held(pool).index == slot.index


def test_a_peer_reads_slots_by_index() -> None:
    fabric = LocalFabric()
    here, there = StagingPool("s", slot_bytes=PAGE_BYTES, count=2), StagingPool("s", slot_bytes=4096, count=4)
    reader, source = LocalTransfer(fabric, "here"), LocalTransfer(fabric, "there")
    reader.register(here.region)
    source.register(there.region)
    slots = [held(there) for _ in range(4)]
    there.bytes_of(slots[3])[:] = 7
    target = held(here)
    ticket = reader.read(reader.connect(source.endpoint()), [Copy("s", 3, "s", target.index, PAGE_BYTES)])
    assert ticket.wait(1.0) is TransferState.DONE
    assert (here.bytes_of(target) == 7).all()


def test_slots_serve_direct_io(tmp_path: Path) -> None:
    pool = StagingPool("s", slot_bytes=PAGE_BYTES, count=2)
    source, target = held(pool), held(pool)
    pool.bytes_of(source)[:] = np.arange(PAGE_BYTES) % 251
    try:
        file = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError:
        pytest.skip("no direct I/O on this file system")
    try:
        assert os.pwritev(file, [pool.bytes_of(source).data], 0) == PAGE_BYTES
        assert os.preadv(file, [pool.bytes_of(target).data], 0) == PAGE_BYTES
    finally:
        os.close(file)
    assert np.array_equal(pool.bytes_of(source), pool.bytes_of(target))


def test_an_array_outlives_its_pool() -> None:
    pool = StagingPool("s", slot_bytes=mmap.PAGESIZE, count=1)
    row = pool.bytes_of(held(pool))
    row[:] = 3
    del pool
    assert (row == 3).all()
