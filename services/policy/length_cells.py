"""Counts of output lengths by cell: a logarithmic histogram that forgets, and a bounded set of them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

# Four bins an octave, from one token to a million
BINS: Final = 80
_BINS_PER_OCTAVE: Final = 4

Counts: TypeAlias = npt.NDArray[np.float64]
CellKey: TypeAlias = tuple[str, ...]
CellSnapshot: TypeAlias = Mapping[CellKey, tuple[float, ...]]


def bin_of(tokens: int) -> int:
    """Bin of a length."""
    return min(BINS - 1, int(_BINS_PER_OCTAVE * math.log2(max(1, tokens))))


def quantiles(density: Counts, levels: Iterable[float]) -> list[float]:
    """Lengths below which the given shares of a density lie; inside a bin they grow geometrically."""
    edges = np.cumsum(density)
    total = float(edges[-1])
    if total <= 0:
        raise ValueError("a density of nothing has no quantiles")
    goals = np.clip(np.asarray(tuple(levels)), 0.0, 1.0) * total
    bins = np.minimum(BINS - 1, np.searchsorted(edges, goals))
    inside = density[bins]
    share = (goals - (edges[bins] - inside)) / np.where(inside > 0, inside, 1.0)
    lengths: list[float] = np.exp2((bins + np.clip(share, 0.0, 1.0)) / _BINS_PER_OCTAVE).tolist()
    return lengths


@dataclass(slots=True)
class Cell:
    """One histogram. Its weight never exceeds ``window``: then each new length fades the old ones a little."""

    counts: Counts
    weight: float = 0.0

    def add(self, density: Counts, *, window: float) -> None:
        """Add one observation, spread as ``density`` (sum 1) says."""
        if self.weight + 1 > window:
            fade = (window - 1) / self.weight
            self.counts *= fade
            self.weight *= fade
        self.counts += density
        self.weight += 1


class Cells:
    """At most ``limit`` cells; the one that was not added to for longest goes first.

    What other replicas counted is kept apart, so that the same snapshot may come any number of times.
    """

    def __init__(self, *, limit: int, window: float, max_replicas: int) -> None:
        if limit < 16 or window < 8 or max_replicas < 1:
            raise ValueError(f"too small: limit={limit}, window={window}, max_replicas={max_replicas}")
        self._limit = limit
        self._window = window
        self._max_replicas = max_replicas
        self._own: OrderedDict[CellKey, Cell] = OrderedDict()
        self._replicas: OrderedDict[str, dict[CellKey, Counts]] = OrderedDict()
        self._others: dict[CellKey, Counts] = {}
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._own)

    def counts(self, key: CellKey) -> tuple[Counts | None, float]:
        """Counts of all replicas and their weight; (None, 0) if nobody knows the cell."""
        own, others = self._own.get(key), self._others.get(key)
        if others is None:
            return (None, 0.0) if own is None else (own.counts, own.weight)
        counts = others if own is None else own.counts + others
        return counts, float(counts.sum())

    def add(self, key: CellKey, density: Counts) -> None:
        """Add one observation to a cell."""
        cell = self._own.get(key)
        if cell is None:
            cell = self._own[key] = Cell(np.zeros(BINS))
            if len(self._own) > self._limit:
                self._own.popitem(last=False)
                self.evictions += 1
        self._own.move_to_end(key)
        cell.add(density, window=self._window)

    def snapshot(self, *, newest: int) -> dict[CellKey, tuple[float, ...]]:
        """Own counts of the cells added to last, for other replicas."""
        keys = list(self._own)[-newest:]
        return {key: tuple(round(float(count), 3) for count in self._own[key].counts) for key in keys}

    def merge(self, replica: str, snapshot: CellSnapshot) -> None:
        """Take another replica's snapshot in place of its last one.

        Raises:
            ValueError: Not a snapshot: wrong number of bins, or counts that are negative or no numbers.
        """
        taken: dict[CellKey, Counts] = {}
        for key, values in list(snapshot.items())[: self._limit]:
            counts = np.array(values, dtype=np.float64)
            if counts.shape != (BINS,) or not np.isfinite(counts).all() or (counts < 0).any():
                raise ValueError(f"not a histogram of {BINS} bins: {key}")
            weight = float(counts.sum())
            # A replica's word weighs no more than ours
            taken[key] = counts * min(1.0, self._window / weight) if weight else counts
        self._replicas[replica] = taken
        self._replicas.move_to_end(replica)
        while len(self._replicas) > self._max_replicas:
            self._replicas.popitem(last=False)
        self._others = {}
        for cells in self._replicas.values():
            for key, counts in cells.items():
                known = self._others.get(key)
                self._others[key] = counts if known is None else known + counts
