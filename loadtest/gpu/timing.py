"""Seconds of work on a device, and the ceilings of that device, measured the same way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

_FLUSH_BYTES: Final = 256 << 20  # several times a GPU's second-level cache
_BUDGET_S: Final = 0.25  # of repeats of one measurement
_MOST: Final = 50
_LEAST: Final = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device did in this run: bytes/s of a copy (read + written), FLOP/s of a bfloat16 product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, bytes_moved: float, flops: float) -> float:
        """Seconds below which such work cannot be done at these rates."""
        return max(bytes_moved / self.bytes_per_s, flops / self.flops_per_s)


class Timer:
    """Median seconds of calls on one device; on a GPU by events, from a captured graph where that works."""

    def __init__(self, device: str, *, repeats: int | None = None) -> None:
        self.cuda = device.startswith("cuda")
        self._repeats = repeats
        self._flush = torch.empty(_FLUSH_BYTES if self.cuda else 1, dtype=torch.uint8, device=device)
        self.captured = False  # whether the last measurement was of a graph

    def seconds(self, call: Callable[[], object]) -> float:
        """Median of repeated calls with cold caches; the first calls, which compile, are not counted."""
        if not self.cuda:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        replay = self._capture(call)
        first = self._once(replay)
        count = self._repeats or max(_LEAST, min(_MOST, int(_BUDGET_S / max(first, 1e-6))))
        return statistics.median(self._once(replay) for _ in range(count))

    def _capture(self, call: Callable[[], object]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        self.captured = True
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:  # something in it waits for the host: time it as it is
            self.captured = False
            torch.cuda.synchronize()
            return call
        return graph.replay

    def _once(self, call: Callable[[], object]) -> float:
        self._flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measure_ceilings(timer: Timer, device: str) -> Ceilings:
    """A copy of 4 GiB and a product of 8192 x 8192 x 8192 on a GPU; small ones elsewhere."""
    nbytes, size = (4 << 30, 8192) if timer.cuda else (1 << 20, 64)
    return Ceilings(
        2 * nbytes / _copy_seconds(timer, nbytes, device), 2 * size**3 / _product_seconds(timer, size, device)
    )


def _copy_seconds(timer: Timer, nbytes: int, device: str) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timer.seconds(lambda: target.copy_(source))


def _product_seconds(timer: Timer, size: int, device: str) -> float:
    a = torch.randn(size, size, device=device).bfloat16()
    b = torch.randn(size, size, device=device).bfloat16()
    return timer.seconds(lambda: a @ b)
