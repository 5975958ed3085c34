"""What is done to many blocks in one call is what would be done to each, with native code and without."""

from __future__ import annotations

import platform
import shutil
import sysconfig
from pathlib import Path

import epdserve.kvstore.native as native_module
import google_crc32c
import numpy as np
import pytest
from epdserve.kvstore.native import copy_pages, crc32c_of, seal_records
from epdserve.kvstore.ssd.slots import aligned

DICE = np.random.default_rng(0)
SPLIT, COVERS = 70_001, 132


BUILT = native_module._native is not None


def test_the_native_module_is_there_where_it_can_be_built() -> None:
    headers = Path(sysconfig.get_path("include"), "Python.h").is_file()
    can_build = platform.machine() == "x86_64" and headers and shutil.which("gcc") is not None
    assert can_build == BUILT


@pytest.fixture(params=["native", "python"] if BUILT else ["python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(native_module, "_native", None)


def noise(count: int, nbytes: int) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    pages = aligned(count, nbytes)
    pages[:] = DICE.integers(0, 256, pages.shape, np.uint8)
    return list(pages)


@pytest.mark.parametrize("nbytes", [0, 1, 127, 4096, 65_536, 114_688, 114_688 + 77])
@pytest.mark.parametrize("offset", [0, 1, 32])
def test_pages_are_copied_to_the_byte(nbytes: int, offset: int) -> None:
    sources = noise(3, nbytes)
    targets = [page[offset : offset + nbytes] for page in noise(3, nbytes + 64)]
    copy_pages(targets, sources)
    assert all(np.array_equal(target, source) for target, source in zip(targets, sources, strict=True))


@pytest.mark.parametrize("records", range(8))
@pytest.mark.parametrize("count", [0, 7, 8, 1001])
def test_crc32c_of_many_is_that_of_each(records: int, count: int) -> None:
    buffers = noise(records, 1001) if records else []
    assert crc32c_of(buffers, count) == [google_crc32c.value(one[:count].tobytes()) for one in buffers]


@pytest.mark.parametrize("records", [1, 2, 3, 7])
def test_a_sealed_end_holds_all_three_crc32c_and_nothing_else_changes(records: int) -> None:
    bodies, ends = noise(records, SPLIT), noise(records, COVERS + 32 + 128 + 9)
    before = [end.copy() for end in ends]
    seal_records(bodies, SPLIT, ends, COVERS)
    for body, end, old in zip(bodies, ends, before, strict=True):
        crc = google_crc32c.value(body.tobytes() + old[:COVERS].tobytes())
        wanted, name = old.copy(), COVERS + 32
        wanted[COVERS : COVERS + 4] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
        wanted[name + 104 : name + 108] = wanted[COVERS : COVERS + 4]
        crc_of_name = google_crc32c.value(wanted[name : name + 124].tobytes())
        wanted[name + 124 : name + 128] = np.frombuffer(crc_of_name.to_bytes(4, "little"), np.uint8)
        assert np.array_equal(end, wanted)


def test_buffers_that_are_too_short_are_refused() -> None:
    with pytest.raises(ValueError, match="100 bytes"):
        crc32c_of(noise(2, 99), 100)
    with pytest.raises(ValueError, match="bytes of a buffer"):
        seal_records(noise(1, 10), 11, noise(1, 500), COVERS)
    with pytest.raises(ValueError, match="bytes of a buffer"):
        seal_records(noise(1, 10), 10, noise(1, COVERS + 32 + 127), COVERS)
    with pytest.raises(ValueError):  # noqa: PT011 - two wordings
        seal_records(noise(2, 10), 10, noise(1, 500), COVERS)
    with pytest.raises(ValueError):  # noqa: PT011
        copy_pages(noise(1, 10), noise(1, 11))
    with pytest.raises(ValueError):  # noqa: PT011
        copy_pages(noise(2, 10), noise(1, 10))
