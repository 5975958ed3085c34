"""Blocks to SSD and back, verified, against raw direct I/O on the same disk at the same queue depth."""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
from epdserve.kernels.checksum import host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.ssd.retention import Admission
from epdserve.kvstore.ssd.tier import DirectorySpec, SsdSettings, SsdTier
from epdserve.kvstore.ssd.write_behind import BlockPut
from epdserve.kvstore.types import BlockHash
from epdserve.loadtest.kv_bench_memory import aligned_pages, blocks
from epdserve.loadtest.kv_bench_row import BLOCK_BYTES, PAYLOAD_BYTES, Row, Rows, Target, times_s

_THREADS: Final = 4
_CHUNK_BLOCKS: Final = 16  # of a raw request: 1.75 MiB
_TENANT: Final = b"kv_bench tenant."
_ROOT: Final = bytes(32)


def measure(*, count: int = 256, rounds: int = 5) -> Rows:
    """``count`` blocks a round, new ones each time, in the folder for temporary files."""
    with tempfile.TemporaryDirectory(prefix="epdserve-kv-bench-") as folder:
        raw, tier = _Raw(Path(folder) / "raw", count), _Tier(Path(folder) / "tier", count, rounds + 2)
        try:
            write_s, _, put_s, read_s, get_s, pick_s, pick_get_s = times_s(
                raw.write,
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
    gigabytes = count * BLOCK_BYTES / 1e9
    name = f"raw direct I/O, {_THREADS} threads"
    yield Row(
        "SSD put, durable", gigabytes / put_s, "GB/s", gigabytes / write_s, name + ", fdatasync", Target(0.85)
    )
    yield Row(
        "SSD get of a chain, verified", gigabytes / get_s, "GB/s", gigabytes / read_s, name, Target(0.8)
    )
    yield Row(
        "SSD get of scattered blocks, verified",
        gigabytes / pick_get_s,
        "GB/s",
        gigabytes / pick_s,
        name,
        Target(0.8),
    )


class _Raw:
    """A preallocated file, read and written in large requests or block by block."""

    def __init__(self, path: Path, count: int) -> None:
        self.count = count
        self.memory = mmap.mmap(-1, count * BLOCK_BYTES)
        self.pages = np.frombuffer(self.memory, np.uint8)
        self.pages[:] = np.random.default_rng(0).integers(0, 256, len(self.pages), np.uint8)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.file, 0, count * BLOCK_BYTES)
        self.threads = ThreadPoolExecutor(_THREADS)
        self.order = np.random.default_rng(1).permutation(count).tolist()

    def write(self) -> None:
        self._each(lambda at, chunk: os.pwritev(self.file, [chunk], at), range(0, self.count, _CHUNK_BLOCKS))
        os.fdatasync(self.file)

    def read(self) -> None:
        self._each(lambda at, chunk: os.preadv(self.file, [chunk], at), range(0, self.count, _CHUNK_BLOCKS))

    def read_scattered(self) -> None:
        self._each(lambda at, chunk: os.preadv(self.file, [chunk], at), self.order, blocks_each=1)

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

    def __init__(self, folder: Path, count: int, rounds: int) -> None:
        spec = DirectorySpec(str(folder), int(count * BLOCK_BYTES * rounds * 1.2))
        settings = SsdSettings(write_behind_blocks=count, io_threads=_THREADS)
        self.tier = SsdTier([spec], payload_bytes=PAYLOAD_BYTES, checksum=host_checksum, settings=settings)
        self.tier.open()
        _, self.pages = blocks(count)
        self.targets = aligned_pages(count)
        self.hashes: list[BlockHash] = []
        self.order = np.random.default_rng(1).permutation(count).tolist()
        self.dice = np.random.default_rng(2)

    def prepare(self) -> None:
        """Give the blocks new names."""
        self.hashes = [BlockHash(self.dice.bytes(16)) for _ in self.pages]
        for page, block_hash in zip(self.pages, self.hashes, strict=True):
            checksum = host_checksum(page[:PAYLOAD_BYTES].data, block_hash)
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
