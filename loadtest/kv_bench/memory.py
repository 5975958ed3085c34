"""Blocks into and out of the host cache, against plain copies of the same blocks."""

import numpy as np
from epdserve.kernels.checksum import HOST_CHECKSUM_KERNEL, host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader, Checksum
from epdserve.kvstore.host_cache import HostCache
from epdserve.kvstore.staging import Bytes, StagingPool
from epdserve.kvstore.types import BlockHash
from epdserve.loadtest.kv_bench.row import BLOCK_BYTES, PAYLOAD_BYTES, Row, Rows, Target, times_s
from numpy.typing import NDArray


def blocks(count: int, seed: int = 0) -> tuple[list[BlockHeader], NDArray[np.uint8]]:
    """A chain of valid blocks of random bytes: headers, and (count, BLOCK_BYTES) pages."""
    dice = np.random.default_rng(seed)
    pages = dice.integers(0, 256, (count, BLOCK_BYTES), np.uint8)
    headers = []
    for page in pages:
        block_hash = BlockHash(dice.bytes(16))
        checksum = host_checksum(page[:PAYLOAD_BYTES].data, block_hash)
        header = BlockHeader(block_hash, checksum, PAYLOAD_BYTES, exact=True)
        page[PAYLOAD_BYTES : PAYLOAD_BYTES + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
        headers.append(header)
    return headers, pages


def aligned_pages(count: int) -> list[Bytes]:
    """Pages of ``BLOCK_BYTES`` on page boundaries, zero."""
    pool = StagingPool("pages", slot_bytes=BLOCK_BYTES, count=count)
    return [pool.bytes_of(slot) for _ in range(count) if (slot := pool.acquire()) is not None]


class _Bench:
    def __init__(self, count: int) -> None:
        self.headers, pages = blocks(count)
        self.hashes = [header.block_hash for header in self.headers]
        # page-aligned as a worker's pages are: sixteen bytes off, the processor mistakes loads for late stores
        self.sources, self.targets = aligned_pages(count), aligned_pages(count)
        for source, page in zip(self.sources, pages, strict=True):
            np.copyto(source, page)
        self.cache = HostCache(StagingPool("host_cache", slot_bytes=BLOCK_BYTES, count=count))

    def memcpy(self) -> None:
        for target, source in zip(self.targets, self.sources, strict=True):
            np.copyto(target, source)

    def sums(self) -> None:
        host_checksum.sums(self.sources, PAYLOAD_BYTES, self.hashes)

    def copy_and_sum(self) -> None:
        host_checksum.copy(self.targets, self.sources, PAYLOAD_BYTES, self.hashes)

    def put(self, checksum: Checksum | None) -> None:
        held = self.cache.put_chain(self.sources, self.headers, parent=None, checksum=checksum)
        assert held == len(self.headers)

    def get(self, checksum: Checksum | None) -> None:
        found = self.cache.copy_prefix(self.hashes, self.targets, checksum=checksum)
        assert len(found) == len(self.hashes)

    def pin(self) -> None:
        self.cache.release(self.cache.match(self.hashes))

    def clear(self) -> None:
        self.cache.delete(self.hashes)


def measure(*, count: int = 256, rounds: int = 25) -> Rows:
    """Put and get, verified and not; ``count`` blocks a round."""
    bench = _Bench(count)
    gigabytes = count * BLOCK_BYTES / 1e9
    # clearing costs a microsecond a block and stands in for the eviction that a full cache would do
    copy_s, sums_s, both_s, clear_s, put_s, _, put_sums_s, get_s, get_sums_s, pin_s = times_s(
        bench.memcpy,
        bench.sums,
        bench.copy_and_sum,
        bench.clear,
        lambda: bench.put(None),
        bench.clear,
        lambda: bench.put(host_checksum),
        lambda: bench.get(None),
        lambda: bench.get(host_checksum),
        bench.pin,
        rounds=rounds,
    )
    del clear_s
    floor, name = gigabytes / copy_s, "memcpy block by block"
    yield Row(f"checksum of blocks ({HOST_CHECKSUM_KERNEL})", gigabytes / sums_s, "GB/s", floor, name)
    yield Row("copy and checksum in one pass", gigabytes / both_s, "GB/s", floor, name)
    for what, seconds, least in (
        ("host cache put", put_s, 0.8),
        ("host cache put, verified", put_sums_s, 0.5),
        ("host cache get into pages", get_s, 0.8),
        ("host cache get into pages, verified", get_sums_s, 0.5),
    ):
        yield Row(what, gigabytes / seconds, "GB/s", floor, name, Target(least))
    yield Row("host cache match and release, no copy", count / pin_s, "blocks/s")
