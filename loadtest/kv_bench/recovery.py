"""How long a tier takes to serve again after kill -9, with its table of names and without it.

A process of its own fills the directory and is killed:

    python -m epdserve.loadtest.kv_bench.recovery fill FOLDER BLOCKS
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from epdserve.kernels.checksum import host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.ssd.tier import DirectorySpec, SsdTier
from epdserve.kvstore.ssd.write_behind import BlockPut
from epdserve.kvstore.types import BlockHash
from epdserve.loadtest.kv_bench.memory import aligned_pages
from epdserve.loadtest.kv_bench.row import BLOCK_BYTES, PAYLOAD_BYTES, Row, Rows, Target

_MODULE: Final = "epdserve.loadtest.kv_bench.recovery"
_BATCH: Final = 256
_TENANT: Final = b"kv_bench tenant."
_ROOT: Final = bytes(32)
_SPARE: Final = 1.05  # slots for a block: below that sweeps would begin


def measure(gigabytes: float = 1.0) -> Rows:
    """Fill, kill, open with the table, open without it; the size of the tier is in the rows' names."""
    count = max(1, int(gigabytes * 1e9 / BLOCK_BYTES))
    with tempfile.TemporaryDirectory(prefix="epdserve-kv-bench-") as folder:
        _fill_and_die(folder, count)
        for what, limit_s in (("intact", 5.0), ("lost", 60.0)):
            if what == "lost":
                Path(folder, "names.tbl").unlink()
            seconds, blocks = _open(folder, count)
            if blocks != count:
                raise RuntimeError(f"{blocks} blocks of {count} were found")
            target = Target(limit_s, "value", at_most=True) if gigabytes >= 10 else None
            size = f"{gigabytes:g} GB, {count:,} blocks"
            yield Row(
                f"kill -9 to first hit, {size}, catalog {what}",
                seconds,
                "s",
                _scan_floor_s(folder, count) if what == "lost" else None,
                "pread of 4 KiB a block, one after the other, in one thread",
                target,
            )


def fill(folder: str, count: int) -> None:
    """Store ``count`` blocks, say so, and wait to be killed."""
    tier = _tier(folder, count)
    tier.open()
    pages = aligned_pages(_BATCH)
    dice = np.random.default_rng(0)
    for page in pages:
        page[:PAYLOAD_BYTES] = dice.integers(0, 256, PAYLOAD_BYTES, np.uint8)
    for start in range(0, count, _BATCH):
        some = pages[: min(_BATCH, count - start)]
        names = [_name(start + offset) for offset in range(len(some))]
        sums = host_checksum.sums(some, PAYLOAD_BYTES, names)
        for page, name, total in zip(some, names, sums, strict=True):
            header = BlockHeader(name, total, PAYLOAD_BYTES, exact=True)
            page[PAYLOAD_BYTES : PAYLOAD_BYTES + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
        tier.put_batch([BlockPut(page, None, _TENANT, _ROOT) for page in some])
    print("full", flush=True)
    signal.pause()


def _fill_and_die(folder: str, count: int) -> None:
    arguments = [sys.executable, "-P", "-m", _MODULE, "fill", folder, str(count)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        told = victim.stdout.readline()
        victim.kill()
    if told != "full\n":
        raise RuntimeError("the tier was not filled")


def _open(folder: str, count: int) -> tuple[float, int]:
    """Seconds from the beginning to a first hit, and blocks found."""
    (page,) = aligned_pages(1)
    started = time.perf_counter()
    tier = _tier(folder, count)
    opened = tier.open()
    if tier.get_batch([_name(count // 2)], [page])[0] is None:
        raise RuntimeError("a stored block was missed")
    seconds = time.perf_counter() - started
    tier.abandon()
    return seconds, opened.blocks


def _scan_floor_s(folder: str, count: int) -> float:
    """Seconds to read a sector of each slot with plain calls, from a sample."""
    (page,) = aligned_pages(1)
    sample = min(count, 4000)
    fd = os.open(Path(folder, "slots-0000.dat"), os.O_RDONLY | os.O_DIRECT)
    try:
        started = time.perf_counter()
        for slot in range(sample):
            os.preadv(fd, [page.data[:4096]], slot * BLOCK_BYTES)
        return (time.perf_counter() - started) / sample * count
    finally:
        os.close(fd)


def _tier(folder: str, count: int) -> SsdTier:
    capacity = (int(count * _SPARE) + 8) * BLOCK_BYTES
    return SsdTier([DirectorySpec(folder, capacity)], payload_bytes=PAYLOAD_BYTES, checksum=host_checksum)


def _name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


if __name__ == "__main__":
    _, where, blocks = sys.argv[1:]
    fill(where, int(blocks))
