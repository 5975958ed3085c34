"""Checksums in native code: the numbers of numpy, copies included, and what wrong arguments do."""

import importlib
import sys
import threading
from types import ModuleType

import numpy as np
import pytest
import torch
from epdserve.kernels.checksum import HOST_CHECKSUM_KERNEL, HostChecksum, page_checksums_host
from epdserve.kernels.checksum import host as host_module
from epdserve.kernels.checksum.dispatch import page_checksums
from epdserve.kernels.checksum.reference import page_checksums_ref
from epdserve.kernels.checksum.twin import page_checksums_numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

PAYLOAD_BYTES = 113_920  # of the released model's block
PAGE_BYTES = 114_688
HASH = bytes(range(16))
sums_of = HostChecksum()

needs_native = pytest.mark.skipif(
    HOST_CHECKSUM_KERNEL == "numpy", reason="no C compiler when this was installed"
)


def random_pages(count: int, page_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, page_bytes), dtype=np.uint8)


@pytest.fixture(params=["built", "numpy"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whatever was built, then what is left without a compiler."""
    if request.param == "numpy":
        monkeypatch.setattr(host_module, "_native", None)
    return str(request.param)


@given(st.integers(1, 400), st.data())
def test_every_form_gives_the_numbers_of_numpy(page_bytes: int, data: st.DataObject) -> None:
    pages = random_pages(3, page_bytes, seed=data.draw(st.integers(0, 1000)))
    if data.draw(st.booleans()):
        pages[:] = data.draw(st.sampled_from([0x00, 0x7F, 0x80, 0xFF]))
    payload_bytes = data.draw(st.integers(0, page_bytes))
    ids = data.draw(st.lists(st.integers(0, 2), max_size=5))
    hashes = [bytes([place]) * 16 for place in ids]
    wanted = page_checksums_numpy(pages, ids, payload_bytes, hashes)
    chosen = [pages[place] for place in ids]
    targets = [np.zeros(page_bytes, np.uint8) for _ in ids]
    assert page_checksums_host(pages, ids, payload_bytes, hashes) == wanted
    assert page_checksums(torch.from_numpy(pages), ids, payload_bytes, hashes) == wanted
    assert sums_of.sums(chosen, payload_bytes, hashes) == wanted
    assert [
        sums_of(page.data[:payload_bytes], name) for page, name in zip(chosen, hashes, strict=True)
    ] == wanted
    assert sums_of.copy(targets, chosen, payload_bytes, hashes) == wanted
    assert all((target == source).all() for target, source in zip(targets, chosen, strict=True))


@pytest.mark.parametrize("misaligned", [0, 1, 4, 31])
def test_blocks_of_the_released_model_at_any_address(kernel: str, misaligned: int) -> None:
    memory = random_pages(1, 2 * PAGE_BYTES + 64)[0]
    source = memory[misaligned : misaligned + PAGE_BYTES]
    target = np.zeros(PAGE_BYTES + 64, np.uint8)[misaligned:][:PAGE_BYTES]
    (wanted,) = page_checksums_ref(torch.from_numpy(source.copy())[None], [0], PAYLOAD_BYTES, [HASH])
    assert sums_of(source.data[:PAYLOAD_BYTES], HASH) == wanted
    assert sums_of.copy([target], [source], PAYLOAD_BYTES, [HASH]) == [wanted]
    assert (target == source).all()


@pytest.mark.parametrize("word", [0x80000000, 0xFFFFFFFF, 0x7FFFFFFF, 1])
def test_extreme_words_sum_as_the_formula_says(word: int) -> None:
    page = np.full(200_001, word, "<u4").view(np.uint8)
    assert sums_of(page.data, HASH) == page_checksums_numpy(page[None], [0], len(page), [HASH])[0]


def test_a_pool_that_is_not_contiguous_is_read_all_the_same() -> None:
    pool = random_pages(4, 64)
    assert page_checksums_host(pool[::2], [1], 60, [HASH]) == page_checksums_host(pool, [2], 60, [HASH])
    tensor = torch.from_numpy(pool)[::2]
    assert page_checksums(tensor, [1], 60, [HASH]) == page_checksums_host(pool, [2], 60, [HASH])


def test_wrong_arguments_are_refused(kernel: str) -> None:
    pool = random_pages(2, 64)
    page = pool[0]
    with pytest.raises(IndexError, match="2"):
        page_checksums_host(pool, [2], 60, [HASH])
    with pytest.raises(ValueError, match=r"hash|argument"):
        page_checksums_host(pool, [0, 1], 60, [HASH])
    with pytest.raises(ValueError, match="15"):
        sums_of.sums([page], 60, [HASH[:15]])
    with pytest.raises(ValueError, match=r".+"):
        sums_of.copy([np.zeros(63, np.uint8)], [page], 60, [HASH])
    with pytest.raises(ValueError, match=r".+"):
        sums_of.copy([page.copy()], [], 60, [])


@needs_native
def test_native_code_refuses_what_would_leave_its_buffers() -> None:
    pool = random_pages(2, 64)
    read_only = pool[0].copy()
    read_only.flags.writeable = False
    with pytest.raises(IndexError):
        page_checksums_host(pool, [-1], 60, [HASH])
    with pytest.raises(ValueError, match="65"):
        page_checksums_host(pool, [0], 65, [HASH])
    with pytest.raises(ValueError, match="65"):
        sums_of.sums([pool[0]], 65, [HASH])
    with pytest.raises((ValueError, BufferError), match="read-only"):
        sums_of.copy([read_only], [pool[1]], 60, [HASH])
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        sums_of.sums([pool[0][::2]], 30, [HASH])


@needs_native
def test_other_threads_run_while_it_works(request: pytest.FixtureRequest) -> None:
    pages = random_pages(8, 1 << 22)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # from here on a thread gets the lock only from one that lets go of it
    request.addfinalizer(lambda: sys.setswitchinterval(interval_s))
    running, seen = threading.Event(), threading.Event()

    def watch() -> None:
        running.wait(10)
        seen.set()  # needs Python's lock

    thread = threading.Thread(target=watch)
    thread.start()
    running.set()
    for _ in range(200):
        page_checksums_host(pages, range(8), 1 << 22, [HASH] * 8)
        if seen.is_set():
            break
    thread.join(10)
    assert seen.is_set()


def test_a_module_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = ModuleType("_native")
    stale.VERSION, stale.KERNEL = 0, "old"  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib, "import_module", lambda name: stale)
    assert host_module._load() is None
