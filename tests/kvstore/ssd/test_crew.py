"""Native threads and a disk's calls do the same with records: every byte, every crc32c, every error."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from epdserve.kvstore.native import native
from epdserve.kvstore.ssd.crew import Crew, DiskCrew, NativeCrew, Run, crew_of
from epdserve.kvstore.ssd.disk import Bytes, SystemDisk
from epdserve.kvstore.ssd.slots import aligned
from support.broken_disk import BrokenDisk

SLOT, SPLIT, COVERS = 12_288, 8192, 132  # a record: 8192 bytes of a body, then an end of 4096
KINDS = ["in-place", "python-threads", *(["native"] if native() is not None else [])]


@pytest.fixture(params=KINDS)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    made: Crew = (
        NativeCrew(3)
        if request.param == "native"
        else DiskCrew(SystemDisk(), 3 if request.param == "python-threads" else 0)
    )
    yield made
    made.stop()


def records(count: int, seed: int = 0) -> tuple[list[Bytes], list[Bytes]]:
    whole = aligned(count, SLOT)
    whole[:] = np.random.default_rng(seed).integers(0, 256, whole.shape, np.uint8)
    return list(whole), list(whole[:, SPLIT:])


def opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)


def test_what_is_written_is_sealed_and_read_back_with_its_sums(tmp_path: Path, crew: Crew) -> None:
    one, two = opened(tmp_path / "one"), opened(tmp_path / "two")
    bodies, ends = records(9)
    runs = [
        Run(one, 2 * SLOT, range(4)),
        Run(two, 0, range(4, 5)),
        Run(two, 5 * SLOT, range(5, 9)),
    ]
    assert crew.write(runs, bodies, SPLIT, ends, COVERS)().errors == [0, 0, 0]
    for body in bodies:  # ends lie in their bodies here
        assert int.from_bytes(body[SPLIT + COVERS :][:4].tobytes(), "little") == google_crc32c.value(
            body[: SPLIT + COVERS].tobytes()
        )
    back = aligned(9, SLOT)
    moved = crew.read(runs, list(back), 5000)()
    assert moved.errors == [0, 0, 0]
    assert np.array_equal(back, np.stack(bodies))
    assert moved.crcs == [google_crc32c.value(body[:5000].tobytes()) for body in bodies]
    os.close(one)
    os.close(two)


def test_a_run_that_fails_does_not_touch_the_others(tmp_path: Path, crew: Crew) -> None:
    file, readable = opened(tmp_path / "file"), os.open(tmp_path / "file", os.O_RDONLY)
    full = os.open("/dev/full", os.O_WRONLY)
    bodies, ends = records(4)
    runs = [Run(fd, SLOT * at, range(at, at + 1)) for at, fd in enumerate((full, file, readable, file))]
    assert crew.write(runs, bodies, SPLIT, ends, COVERS)().errors == [errno.ENOSPC, 0, errno.EBADF, 0]
    back = aligned(3, SLOT)
    runs = [Run(file, SLOT, range(1)), Run(full, 0, range(1, 2)), Run(file, 3 * SLOT, range(2, 3))]
    moved = crew.read(runs, list(back), SLOT)()
    assert moved.errors == [0, errno.EBADF, 0]
    assert np.array_equal(back[0], bodies[1])
    assert np.array_equal(back[2], bodies[3])
    for fd in (file, readable, full):
        os.close(fd)


def test_short_writes_go_on_until_the_error(tmp_path: Path, crew: Crew) -> None:
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    bodies, ends = records(3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * SLOT + 100, before[1]))
    try:
        moved = crew.write([Run(file, 0, range(3))], bodies, SPLIT, ends, COVERS)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert moved.errors == [errno.EFBIG]
    assert os.fstat(file).st_size == 2 * SLOT + 100
    assert os.pread(file, 2 * SLOT + 100, 0) == b"".join(map(bytes, bodies))[: 2 * SLOT + 100]
    os.close(file)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, crew: Crew) -> None:
    (tmp_path / "file").write_bytes(bytes(SLOT + 4096))
    file = opened(tmp_path / "file")
    pages = aligned(2, SLOT)
    moved = crew.read([Run(file, 0, range(1)), Run(file, SLOT, range(1, 2))], list(pages), SLOT)()
    assert moved.errors == [0, errno.EIO]
    os.close(file)


@pytest.mark.parametrize("crew", KINDS[1:], indirect=True)  # in place there are no threads to stop
def test_a_stopped_crew_begins_nothing(tmp_path: Path, crew: Crew) -> None:
    file = opened(tmp_path / "file")
    bodies, ends = records(1)
    crew.stop()
    crew.stop()
    with pytest.raises((ValueError, RuntimeError)):
        crew.write([Run(file, 0, range(1))], bodies, SPLIT, ends, COVERS)
    os.close(file)


@pytest.mark.skipif(native() is None, reason="no native code here")
class TestNative:
    def test_a_forgotten_batch_is_written_before_its_buffers_go(self, tmp_path: Path) -> None:
        crew, file = NativeCrew(2), opened(tmp_path / "file")
        bodies, ends = records(64)
        wanted = [body.copy() for body in bodies]
        for at in range(64):
            crew.write([Run(file, SLOT * at, range(1))], [bodies[at]], SPLIT, [ends[at]], COVERS)
        del crew, bodies, ends
        found = np.fromfile(tmp_path / "file", np.uint8).reshape(64, SLOT)
        assert np.array_equal(found[:, :SPLIT], np.stack(wanted)[:, :SPLIT])
        os.close(file)

    def test_it_needs_nothing_of_python_meanwhile(self, tmp_path: Path) -> None:
        crew, file = NativeCrew(2), opened(tmp_path / "file")
        bodies, ends = records(8)
        landing = crew.write([Run(file, 0, range(8))], bodies, SPLIT, ends, COVERS)
        deadline = time.monotonic() + 20
        while os.fstat(file).st_size < 8 * SLOT and time.monotonic() < deadline:
            sum(range(1000))  # holds Python's lock for nearly all of the time
        assert os.fstat(file).st_size == 8 * SLOT
        assert landing().errors == [0]
        os.close(file)

    def test_nonsense_is_refused(self, tmp_path: Path) -> None:
        crew, file = NativeCrew(1), opened(tmp_path / "file")
        bodies, ends = records(2)
        for runs in ([Run(file, 0, range(1))], [Run(file, 0, range(3))], [Run(file, 0, range(0))]):
            with pytest.raises(ValueError, match="runs of"):
                crew.write(runs, bodies, SPLIT, ends, COVERS)
        with pytest.raises(ValueError, match="bodies"):
            crew.write([Run(file, 0, range(2))], bodies, SPLIT, ends[:1], COVERS)
        with pytest.raises(ValueError, match="bytes of a buffer"):
            crew.write([Run(file, 0, range(2))], bodies, SLOT + 1, ends, COVERS)
        with pytest.raises(ValueError, match="bytes of a buffer"):
            crew.read([Run(file, 0, range(2))], bodies, SLOT + 1)
        with pytest.raises(ValueError, match="threads"):
            NativeCrew(0)
        assert os.fstat(file).st_size == 0
        os.close(file)


def test_a_disk_that_changes_a_call_sees_every_call() -> None:
    class Own(SystemDisk):
        pass

    for disk, threads in ((Own(), 2), (BrokenDisk(), 2), (SystemDisk(), 0)):
        assert isinstance(crew_of(disk, threads), DiskCrew)
    threaded = crew_of(SystemDisk(), 1)
    assert isinstance(threaded, NativeCrew) == (native() is not None)
    threaded.stop()
