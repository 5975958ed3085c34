"""What placement is told: prefill and decode workers as arrays, one element a worker, sorted by name.

Arrays and not a list of records, because a choice among hundreds of workers then costs some microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Indices: TypeAlias = npt.NDArray[np.int64]


def floats(values: Sequence[float] | npt.NDArray[np.floating] | npt.NDArray[np.integer]) -> Floats:
    """As an array of float64."""
    return np.asarray(values, dtype=np.float64)


class WorkerNames(tuple[str, ...]):
    """Names that are known to be distinct and sorted: pools are made for every request, their names are not."""

    __slots__ = ()

    def __new__(cls, names: Iterable[str]) -> WorkerNames:
        """Check once.

        Raises:
            ValueError: Not sorted, or not distinct.
        """
        made = super().__new__(cls, names)
        if any(left >= right for left, right in pairwise(made)):
            raise ValueError(f"workers must be distinct and sorted by name: {made[:4]}")
        return made


def _check(names: Sequence[str], arrays: Sequence[npt.NDArray[np.generic]]) -> None:
    if not isinstance(names, WorkerNames):
        WorkerNames(names)
    length = (len(names),)
    if [array for array in arrays if array.shape[-1:] != length]:
        raise ValueError(f"every array needs {len(names)} elements, got {[array.shape for array in arrays]}")


@dataclass(frozen=True, slots=True)
class PrefillPool:
    """Prefill workers that take work.

    Attributes:
        names: Sorted.
        machines: Number of each worker's machine.
        ahead_tokens: Tokens each would compute before this prompt: what waits there and is not passed by it.
        tokens_per_s: How fast each computes, as measured lately.
        hit_tokens: (tiers, workers): leading tokens of the prompt to be had from own pages, from pages and the
            machine's host cache, from these and its SSD, from these and peers; never falling from row to row.
        fetch_bytes_per_s: (tiers,), or (tiers, workers) where each worker has its own: measured; the first is not used.
        trouble_s: Delay expected of a worker beyond its queue: it is slow, its step hangs, calls fail (``health.py``).
    """

    names: Sequence[str]
    machines: Indices
    ahead_tokens: Floats
    tokens_per_s: Floats
    hit_tokens: Floats
    fetch_bytes_per_s: Floats
    trouble_s: Floats

    def __post_init__(self) -> None:
        _check(
            self.names,
            (self.machines, self.ahead_tokens, self.tokens_per_s, self.hit_tokens, self.trouble_s),
        )
        if self.fetch_bytes_per_s.shape not in (self.hit_tokens.shape[:1], self.hit_tokens.shape):
            raise ValueError("one speed for each tier of hits")


@dataclass(frozen=True, slots=True)
class DecodePool:
    """Decode workers that take work.

    A step's time is ``step_s`` plus ``request_s`` for each running request plus ``token_s`` for each token held.

    Attributes:
        running: Requests there or on their way.
        held_tokens: Tokens their KV takes.
        remaining_tokens: Output tokens they are expected to make still, together.
        total_tokens: What the pages hold.
        hit_tokens: Leading tokens of the prompt that the worker has in its own pages.
    """

    names: Sequence[str]
    machines: Indices
    running: Floats
    held_tokens: Floats
    remaining_tokens: Floats
    total_tokens: Floats
    step_s: Floats
    request_s: Floats
    token_s: Floats
    hit_tokens: Floats
    trouble_s: Floats

    def __post_init__(self) -> None:
        _check(
            self.names,
            (
                *(self.machines, self.running, self.held_tokens, self.remaining_tokens, self.total_tokens),
                *(self.step_s, self.request_s, self.token_s, self.hit_tokens, self.trouble_s),
            ),
        )


@dataclass(frozen=True, slots=True)
class Links:
    """Between a prefill and a decode worker.

    Attributes:
        same_machine_bytes_per_s, other_machine_bytes_per_s: Measured speed of hand-offs.
        latency_s, other_latency_s: Of one within a machine and between two, before its first byte.
        fixed_bytes: Moved with each: the tail.
    """

    same_machine_bytes_per_s: float = 50e9
    other_machine_bytes_per_s: float = 25e9
    latency_s: float = 0.002
    fixed_bytes: float = 3e6
    other_latency_s: float = 0.002
