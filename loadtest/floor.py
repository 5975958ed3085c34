"""What this machine can do at all: the floor that measured figures stand beside.

Not a benchmark of libraries: one memcpy and one matrix product, in the way the server itself does them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Floor:
    """Rates of one machine with ``threads`` threads for the product; memcpy is one thread's."""

    threads: int
    memcpy_gb_per_s: float
    gemm_gflop_per_s: float


def measure(*, threads: int) -> Floor:
    """Both rates; takes about two seconds."""
    return Floor(threads, memcpy_gb_per_s(256 << 20), gemm_gflop_per_s(1024, threads=threads))


def memcpy_gb_per_s(nbytes: int) -> float:
    """Bytes copied a second, in 10^9, for one copy of ``nbytes`` into memory that is already mapped."""
    return nbytes / memcpy_s(nbytes) / 1e9


def memcpy_s(nbytes: int) -> float:
    """Seconds for one copy of ``nbytes``: the median of several."""
    source = np.ones(nbytes, dtype=np.uint8)
    target = np.zeros(nbytes, dtype=np.uint8)  # touched here, so that page faults are not timed
    return _median_s(lambda: np.copyto(target, source), repeats=9)


def gemm_gflop_per_s(size: int, *, threads: int) -> float:
    """float32 product of two square matrices with the library that the workers use."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left = torch.rand(size, size)
        right = torch.rand(size, size)
        out = torch.empty(size, size)
        seconds = _median_s(lambda: torch.mm(left, right, out=out), repeats=9)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / seconds / 1e9


def _median_s(work: Callable[[], object], *, repeats: int) -> float:
    work()
    taken = []
    for _ in range(repeats):
        started_at = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started_at)
    return sorted(taken)[repeats // 2]
