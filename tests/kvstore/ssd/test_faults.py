"""Torn, flipped, full, failing and short: a read gives exact bytes or a miss, and the rest serves on."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import numpy as np
import pytest
from epdserve.kvstore.ssd.catalog import HEAD_BYTES
from epdserve.kvstore.ssd.disk import SystemDisk
from epdserve.kvstore.ssd.record import NAME_BYTES
from epdserve.kvstore.ssd.retention import Admission
from epdserve.kvstore.ssd.tier import SsdTier
from support.broken_disk import BrokenDisk, fails, flip
from support.ssd import PAYLOAD, SLOT, make_tier, name, put_of, read, same

BLOCKS = [name(number) for number in range(6)]


def filled(folders: list[Path], **how: object) -> SsdTier:
    tier = make_tier(folders, **how)  # type: ignore[arg-type]
    tier.open()
    tier.put_batch([put_of(block) for block in BLOCKS])
    return tier


def right(tier: SsdTier, *, threads: int = 0) -> list[bool]:
    """Which blocks are there; asserts that those are exact."""
    pages = read(tier, BLOCKS)
    assert all(page is None or same(page, block) for page, block in zip(pages, BLOCKS, strict=True))
    return [page is not None for page in pages]


@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize(
    "offset",
    [0, 1999, PAYLOAD - 1, *(PAYLOAD + field for field in (0, 4, 6, 8, 24, 32, 36, 63))],
)
def test_a_flipped_bit_of_payload_or_header_is_a_miss(tmp_path: Path, offset: int, bit: int) -> None:
    tier = filled([tmp_path])
    flip(str(tmp_path / "slots-0000.dat"), 2 * SLOT + offset, bit)
    there = right(tier)
    assert there.count(False) == 1
    assert right(tier) == there
    assert tier.figures.slots("quarantined") == 1
    tier.check(deep=True)
    tier.close()
    again = make_tier([tmp_path])
    assert again.open().blocks == 5
    assert right(again) == there
    again.close()


@pytest.mark.parametrize("offset", range(0, NAME_BYTES, 7))
def test_a_flipped_bit_of_a_name_on_disk_costs_nothing(tmp_path: Path, offset: int) -> None:
    filled([tmp_path]).close()
    flip(str(tmp_path / "names.tbl"), HEAD_BYTES + NAME_BYTES + offset, 3)
    flip(str(tmp_path / "names.tbl"), HEAD_BYTES + 7 * NAME_BYTES + offset, 3)  # of a free slot
    flip(str(tmp_path / "names.tbl"), offset % 64)
    tier = make_tier([tmp_path])
    assert tier.open().blocks == 6
    assert all(right(tier))
    tier.check(deep=True)
    tier.close()


@pytest.mark.parametrize("keep", [0, 1, 64, 4096, HEAD_BYTES + 3 * NAME_BYTES + 17])
def test_a_table_that_was_cut_off_is_made_good_from_the_slots(tmp_path: Path, keep: int) -> None:
    filled([tmp_path]).close()
    with (tmp_path / "names.tbl").open("r+b") as table:
        table.truncate(keep)
    tier = make_tier([tmp_path])
    tier.open()
    assert all(right(tier))
    tier.check(deep=True)
    tier.close()


def test_random_damage_anywhere_never_gives_a_wrong_byte(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    for _ in range(25):
        for file in tmp_path.iterdir():
            file.unlink()
        filled([tmp_path]).close()
        for file, size in (("slots-0000.dat", 5 * SLOT), ("names.tbl", HEAD_BYTES + 8 * NAME_BYTES)):
            start = int(rng.integers(size))
            junk = rng.bytes(int(rng.integers(1, 6000)))[: size - start]
            with (tmp_path / file).open("r+b") as target:
                target.seek(start)
                target.write(junk)
        tier = make_tier([tmp_path])
        tier.open()
        right(tier)
        tier.check()  # not deep: damage to the name behind a record is no damage to the block
        tier.close()


def test_records_that_changed_places_are_misses(tmp_path: Path) -> None:
    tier = filled([tmp_path])
    data = bytearray((tmp_path / "slots-0000.dat").read_bytes())
    data[:SLOT], data[SLOT : 2 * SLOT] = data[SLOT : 2 * SLOT], data[:SLOT]
    (tmp_path / "slots-0000.dat").write_bytes(data)
    assert right(tier).count(False) == 2
    tier.close()


@pytest.mark.parametrize("threads", [0, 2])
def test_a_slot_that_cannot_be_read_is_a_miss_and_its_neighbours_are_not(
    tmp_path: Path, threads: int
) -> None:
    bad = {2 * SLOT}
    spans: list[int] = []

    class OneBadSlot(SystemDisk):
        def read(self, fd, chunks, offset):  # type: ignore[no-untyped-def]
            end = offset + sum(chunk.nbytes for chunk in chunks)
            if (
                any(offset <= at < end for at in bad)
                and chunks[0].nbytes == SLOT
                and self.size(fd) == 5 * SLOT
            ):
                spans.append(offset)
                raise OSError(errno.EIO, "medium error")
            return super().read(fd, chunks, offset)

    tier = filled([tmp_path], disk=OneBadSlot(), threads=threads)
    there = right(tier)
    assert there.count(False) == 1
    assert len(spans) == 2  # the whole run, then the slot alone
    assert tier.figures.directories("serving") == 1
    tier.close()


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS], ids=["EIO", "EROFS"])
@pytest.mark.parametrize("file", ["slots-", "names.tbl"])
def test_a_failing_drive_is_left_alone_and_the_other_serves(
    tmp_path: Path, operation: str, number: int, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    disk = BrokenDisk()
    tier = make_tier([tmp_path / "bad", tmp_path / "good"], slots=20, disk=disk)
    tier.open()
    tier.put_batch([put_of(block) for block in BLOCKS])
    disk.fault = lambda did, path, _: number if did == operation and "bad" in path and file in path else None
    more = [name(f"more {number}") for number in range(20)]
    tier.put_batch([put_of(block) for block in more])
    assert tier.figures.directories("failed") == 1
    pages = read(tier, [*BLOCKS, *more])
    assert all(page is None or same(page, block) for page, block in zip(pages, [*BLOCKS, *more], strict=True))
    assert tier.put_batch([put_of(name("last"))]) == [Admission.ACCEPTED]
    assert same(read(tier, [name("last")])[0], name("last"))
    tier.check(deep=True)
    tier.close()


def test_a_full_disk_refuses_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = BrokenDisk()
    tier = make_tier([tmp_path], disk=disk)
    tier.open()
    disk.fault = fails("write", "slots-", errno.ENOSPC)
    tier.put_batch([put_of(block) for block in BLOCKS])
    assert not any(right(tier))
    tier.check(deep=True)
    disk.fault = lambda *_: None
    tier.put_batch([put_of(block) for block in BLOCKS])
    assert all(right(tier))
    tier.close()


def test_no_room_to_allocate_leaves_the_drive_out(tmp_path: Path) -> None:
    disk = BrokenDisk(fault=fails("allocate", "bad/slots", errno.ENOSPC))
    tier = make_tier([tmp_path / "bad", tmp_path / "good"], disk=disk)
    assert list(tier.open().failed) == [str(tmp_path / "bad")]
    tier.close()
    again = make_tier([tmp_path / "bad", tmp_path / "good"])
    assert not again.open().failed
    again.close()


def test_short_reads_and_writes_are_finished(tmp_path: Path) -> None:
    tier = filled([tmp_path], disk=BrokenDisk(short=True))
    assert all(right(tier))
    tier.check(deep=True)
    tier.close()


def test_all_drives_gone_is_all_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    disk = BrokenDisk()
    tier = filled([tmp_path], disk=disk)
    disk.fault = lambda did, *_: errno.EIO if did in ("read", "write", "sync") else None
    assert not any(right(tier))
    tier.sweep()
    tier.save_use()
    tier.put_batch([put_of(name("late"))])
    assert tier.try_put(put_of(name("later"))) is Admission.NO_DIRECTORY
    assert not any(right(tier))
    tier.check()
    tier.close()


def test_a_table_that_cannot_be_read_counts_as_lost(tmp_path: Path) -> None:
    filled([tmp_path]).close()
    disk = BrokenDisk()
    disk.fault = lambda did, path, _: errno.EIO if did == "read" and path.endswith("names.tbl") else None
    tier = make_tier([tmp_path], disk=disk)
    assert tier.open().scanned == (str(tmp_path),)
    assert all(right(tier))
    tier.close()
