"""Blocks to SSD and back, verified, against raw direct I/O on the same disk at the same queue depth.

A place on disk that is written for the first time costs the file system more than one that is overwritten, and a
virtual disk's image more again; one that was written a moment ago may cost less than others. So the tier's first lap
stands beside raw writes into places that are fresh as well, for the file system but not for the image under it, and
its later laps beside raw writes that go around as many places as the tier has. Reads are always verified: header,
checksum and crc32c; there is no way to ask the tier for less.
"""

import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from epdserve.kernels.checksum import host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.ssd.retention import Admission, RetentionPolicy
from epdserve.kvstore.ssd.tier import DirectorySpec, SsdSettings, SsdTier
from epdserve.kvstore.ssd.write_behind import BlockPut
from epdserve.kvstore.types import BlockHash
from epdserve.loadtest.kv_bench.memory import aligned_pages, blocks
from epdserve.loadtest.kv_bench.row import BLOCK_BYTES, PAYLOAD_BYTES, Row, Rows, Target, times_s
from numpy.typing import NDArray

_THREADS: Final = 4
_CHUNK_BLOCKS: Final = 16  # of a raw request: 1.75 MiB
_TENANT: Final = b"kv_bench tenant."
_ROOT: Final = bytes(32)
_ZERO_RANGE: Final = 0x10  # of fallocate(2)
_LAPS: Final = 4  # rounds until the tier, and the floor, are around the disk
_SWITCH_INTERVAL_S: Final = 0.0005  # Python's, as workers and stores set it


def measure(*, counts: Sequence[int] = (256, 784), rounds: int = 9) -> Rows:
    """So many blocks a put, new ones each time, in the folder for temporary files: 28 MiB, and 100,000 tokens."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        for count in counts:
            with tempfile.TemporaryDirectory(prefix="epdserve-kv-bench-") as folder:
                yield from _first_lap(Path(folder), count, max(1, rounds - 2))
                yield from _later_laps(Path(folder), count, rounds)
    finally:
        sys.setswitchinterval(interval_s)


def _first_lap(folder: Path, count: int, rounds: int) -> Rows:
    raw = _Raw(folder / "raw-fresh", count, laps=rounds + 1)
    tier = _Tier(folder / "fresh", count, slots=int(count * (rounds + 1) * 1.2), policy=RetentionPolicy())
    for file in (folder / "raw-fresh", *(folder / "fresh").glob("slots-*")):
        _make_fresh(file)
    try:
        write_s, _, put_s = times_s(raw.write, tier.prepare, tier.put, rounds=rounds)
    finally:
        raw.close()
        tier.close()
    gigabytes, name = (
        count * BLOCK_BYTES / 1e9,
        f"raw direct I/O into fresh places, {_THREADS} threads, fdatasync",
    )
    yield Row(
        f"SSD put of {count} blocks, durable, first lap",
        gigabytes / put_s,
        "GB/s",
        gigabytes / write_s,
        name,
        Target(0.85),
    )


def _later_laps(folder: Path, count: int, rounds: int) -> Rows:
    # half of the slots are always free or old enough to go: sweeps happen between rounds and not in them
    policy = RetentionPolicy(floor_s=0, reserve_ratio=0.0, low_free_ratio=0.26, high_free_ratio=0.49)
    raw, tier = (
        _Raw(folder / "raw", count, _LAPS),
        _Tier(folder / "tier", count, slots=_LAPS * count, policy=policy),
    )
    for _ in range(_LAPS):  # until every place was written
        raw.write()
        tier.prepare()
        tier.put()
    try:
        write_s, again_s, beside_s, _, put_s, read_s, get_s, pick_s, pick_get_s = times_s(
            raw.write,
            raw.write_again,
            raw.write_beside_python,
            tier.prepare,
            tier.put,
            raw.read,
            tier.get,
            raw.read_scattered,
            tier.get_scattered,
            rounds=rounds,
        )
    finally:
        raw.close()
        tier.close()
    gigabytes, name = count * BLOCK_BYTES / 1e9, f"raw direct I/O, {_THREADS} threads"
    around = f"{name} around {_LAPS * count} places, fdatasync"
    for what, seconds in (
        ("one place again and again", again_s),
        ("beside a busy thread of Python", beside_s),
    ):
        yield Row(
            f"raw direct I/O, {count} blocks, {what}",
            gigabytes / seconds,
            "GB/s",
            gigabytes / write_s,
            around,
        )
    for what, ours_s, theirs_s, how, target in (
        (f"put of {count} blocks, durable, later laps", put_s, write_s, around, Target(0.85)),
        (f"get of a chain of {count}, verified", get_s, read_s, name, Target(0.8)),
        (f"get of {count} scattered blocks, verified", pick_get_s, pick_s, name, Target(0.8)),
    ):
        yield Row(f"SSD {what}", gigabytes / ours_s, "GB/s", gigabytes / theirs_s, how, target)


class _Raw:
    """A preallocated file, read and written in large requests or block by block."""

    def __init__(self, path: Path, count: int, laps: int = 1) -> None:
        self.count, self.lap, self.laps = count, -1, laps
        self.pages = _joined(aligned_pages(count))
        self.pages[:] = np.random.default_rng(0).integers(0, 256, self.pages.shape, np.uint8)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.file, 0, laps * count * BLOCK_BYTES)
        self.threads = ThreadPoolExecutor(_THREADS)
        self.order = np.random.default_rng(1).permutation(count).tolist()

    def write(self) -> None:
        """Into the next places, around and around."""
        self.lap = (self.lap + 1) % self.laps
        self._write_lap()

    def write_again(self) -> None:
        """Where the last ones went."""
        self._write_lap()

    def write_beside_python(self) -> None:
        """``write``, while another thread computes in Python and never lets go of its lock by itself."""
        over = threading.Event()

        def compute() -> None:
            while not over.is_set():
                sum(range(100))

        busy = threading.Thread(target=compute)
        busy.start()
        try:
            self.write()
        finally:
            over.set()
            busy.join()

    def read(self) -> None:
        """What was written last."""
        self._each(self._read, range(0, self.count, _CHUNK_BLOCKS))

    def read_scattered(self) -> None:
        """Block by block, in any order."""
        self._each(self._read, self.order, blocks_each=1)

    def _write_lap(self) -> None:
        base = self.lap * self.count * BLOCK_BYTES
        self._each(
            lambda at, chunk: os.pwritev(self.file, [chunk], base + at), range(0, self.count, _CHUNK_BLOCKS)
        )
        os.fdatasync(self.file)

    def _read(self, at: int, chunk: memoryview) -> int:
        return os.preadv(self.file, [chunk], self.lap * self.count * BLOCK_BYTES + at)

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.file)

    def _each(
        self,
        request: Callable[[int, memoryview], int],
        firsts: Sequence[int],
        blocks_each: int = _CHUNK_BLOCKS,
    ) -> None:
        view = self.pages.data

        def run(first: int) -> None:
            at, end = first * BLOCK_BYTES, min(first + blocks_each, self.count) * BLOCK_BYTES
            if request(at, view[at:end]) != end - at:
                raise OSError("a short read or write")

        for _ in self.threads.map(run, firsts):
            pass


class _Tier:
    """A tier that is given ``count`` new blocks a round."""

    def __init__(self, folder: Path, count: int, *, slots: int, policy: RetentionPolicy) -> None:
        self.tier = SsdTier(
            [DirectorySpec(str(folder), slots * BLOCK_BYTES)],
            payload_bytes=PAYLOAD_BYTES,
            checksum=host_checksum,
            policy=policy,
            settings=SsdSettings(write_behind_blocks=count, batch_blocks=count, io_threads=_THREADS),
        )
        self.tier.open()
        _, pages = blocks(count)
        self.pages, self.targets = aligned_pages(count), aligned_pages(count)  # as a store's slots are
        for aligned, page in zip(self.pages, pages, strict=True):
            np.copyto(aligned, page)
        self.hashes: list[BlockHash] = []
        self.order = np.random.default_rng(1).permutation(count).tolist()
        self.dice = np.random.default_rng(2)

    def prepare(self) -> None:
        """Give the blocks new names, and make room for them."""
        self.tier.sweep()
        self.hashes = [BlockHash(self.dice.bytes(16)) for _ in self.pages]
        sums = host_checksum.sums(self.pages, PAYLOAD_BYTES, self.hashes)
        for page, block_hash, checksum in zip(self.pages, self.hashes, sums, strict=True):
            header = BlockHeader(block_hash, checksum, PAYLOAD_BYTES, exact=True)
            page[PAYLOAD_BYTES : PAYLOAD_BYTES + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)

    def put(self) -> None:
        parents = [None, *self.hashes[:-1]]
        puts = [
            BlockPut(page, parent, _TENANT, _ROOT) for page, parent in zip(self.pages, parents, strict=True)
        ]
        if any(result is not Admission.ACCEPTED for result in self.tier.put_batch(puts)):
            raise RuntimeError("the tier refused a block")

    def get(self) -> None:
        self._get(self.hashes)

    def get_scattered(self) -> None:
        self._get([self.hashes[i] for i in self.order])

    def close(self) -> None:
        self.tier.close()

    def _get(self, hashes: list[BlockHash]) -> None:
        if any(header is None for header in self.tier.get_batch(hashes, self.targets)):
            raise RuntimeError("a block was missed")


def _make_fresh(path: Path) -> None:
    """Write all of a file and let the file system forget that: its blocks stay, as if never written."""
    size, zeros = path.stat().st_size, aligned_pages(_CHUNK_BLOCKS)
    file = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        for at in range(0, size, _CHUNK_BLOCKS * BLOCK_BYTES):
            os.pwritev(file, [_joined(zeros).data[: size - at]], at)
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        if fallocate(file, _ZERO_RANGE, ctypes.c_long(0), ctypes.c_long(size)):
            raise OSError(ctypes.get_errno(), "fallocate")
        os.fsync(file)
    finally:
        os.close(file)


def _joined(pages: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """The memory of a pool's pages as one array: they are neighbours."""
    whole = pages[0].base
    assert isinstance(whole, np.ndarray), "pages are rows of one array"
    return whole.reshape(-1)
