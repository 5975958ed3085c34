"""Two runs beside each other: differences with confidence intervals, by the bootstrap.

Requests of each run are drawn again with replacement, a thousand times, and each figure is computed anew: the interval
holds the middle 95 % of the differences. It tells chance inside these runs; it does not tell what another day, or
another machine, would bring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from epdserve.loadtest.results.record import Record, Results

Floats: TypeAlias = npt.NDArray[np.float64]

_DRAWS: Final = 1000
_FEWEST: Final = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of two runs.

    Attributes:
        low, high: The middle 95 % of ``second - first``.
        lower_is_better: Whether a negative difference is good news.
    """

    name: str
    first: float
    second: float
    low: float
    high: float
    lower_is_better: bool

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``same`` where the interval holds 0."""
        if self.low <= 0 <= self.high:
            return "same"
        return "better" if (self.high < 0) is self.lower_is_better else "worse"


@dataclass(frozen=True, slots=True)
class _Figure:
    name: str
    read: Callable[[Record], float | None]
    fold: Callable[[Floats], Floats]  # (draws, requests) -> (draws,)
    lower_is_better: bool


def _rank(rank: float) -> Callable[[Floats], Floats]:
    def fold(values: Floats) -> Floats:
        at = max(0, math.ceil(values.shape[1] * rank / 100) - 1)
        folded: Floats = np.partition(values, at, axis=1)[:, at]
        return folded

    return fold


def _mean(values: Floats) -> Floats:
    folded: Floats = np.mean(values, axis=1)
    return folded


def compare(first: Results, second: Results, *, seed: int = 1) -> list[Difference]:
    """Figures that both runs have, each with its interval.

    Goodput is judged by the first run's targets in both.

    Raises:
        ValueError: A run has fewer than five requests.
    """
    for run in (first, second):
        if len(run.records) < _FEWEST:
            raise ValueError(f"{run.name} has {len(run.records)} requests; no interval can be told of so few")
    draw = np.random.default_rng(seed)
    found = []
    for figure in _figures(first):
        sides = [_values(run.records, figure.read) for run in (first, second)]
        if any(len(side) < _FEWEST for side in sides):
            continue
        one, other = (float(figure.fold(side[None])[0]) for side in sides)
        again = [figure.fold(side[draw.integers(0, len(side), (_DRAWS, len(side)))]) for side in sides]
        low, high = np.percentile(again[1] - again[0], (2.5, 97.5))
        found.append(Difference(figure.name, one, other, float(low), float(high), figure.lower_is_better))
    return found


def _figures(first: Results) -> list[_Figure]:
    slo = first.slo
    return [
        _Figure("TTFT p50, ms", lambda r: _ms(r.ttft_s, r), _rank(50), True),
        _Figure("TTFT p90, ms", lambda r: _ms(r.ttft_s, r), _rank(90), True),
        _Figure("TTFT p99, ms", lambda r: _ms(r.ttft_s, r), _rank(99), True),
        _Figure("TPOT p50, ms", lambda r: _ms(r.tpot_s, r), _rank(50), True),
        _Figure("TPOT p99, ms", lambda r: _ms(r.tpot_s, r), _rank(99), True),
        _Figure("request, p50, ms", lambda r: _ms(r.e2e_s, r), _rank(50), True),
        _Figure("in time, share", lambda r: float(r.meets(slo)), _mean, False),
        _Figure("whole, share", lambda r: float(r.ok), _mean, False),
        _Figure("cached, share", _cached, _mean, False),
    ]


def _ms(seconds: float | None, record: Record) -> float | None:
    return 1e3 * seconds if record.ok and seconds is not None else None


def _cached(record: Record) -> float | None:
    return record.cached_tokens / record.prompt_tokens if record.ok and record.prompt_tokens else None


def _values(records: Sequence[Record], read: Callable[[Record], float | None]) -> Floats:
    return np.array([value for record in records if (value := read(record)) is not None])


def rows(first: Results, second: Results, differences: Sequence[Difference]) -> list[list[str]]:
    """The same as text, headings first."""
    head = ["figure", first.name, second.name, "difference", "95 % interval", "verdict"]
    return [head] + [
        [
            one.name,
            f"{one.first:.4g}",
            f"{one.second:.4g}",
            f"{one.second - one.first:+.4g}",
            f"{one.low:+.4g} to {one.high:+.4g}",
            one.verdict,
        ]
        for one in differences
    ]
