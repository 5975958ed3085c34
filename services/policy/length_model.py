"""The length model: how many tokens an answer takes, learnt from finished requests by effort, tenant and prompt class.

A chain of histograms from coarse to fine, each shrunk towards the one before it with a few pseudo-counts (a Dirichlet
prior): with no data it says "anything", with little data what the effort says, with much what this tenant does. Every
histogram forgets, so a shift is followed. The interval's width is corrected online (adaptive conformal inference,
Gibbs and Candes 2021): too many answers outside widen it, too few narrow it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Final

import numpy as np
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.length_cells import (
    BINS,
    CellKey,
    Cells,
    CellSnapshot,
    Counts,
    bin_of,
    quantiles,
)

_POINTS: Final = 8
_LENGTH_CLASSES: Final = (256, 1024, 4096, 16_384, 65_536)
_TURN_CLASSES: Final = (1, 4)
_MISS_LIMITS: Final = (0.02, 0.6)
# Forecasts are kept until so many answers have come: a router makes some for every request
_MEMO_NEWS: Final = 8
_MEMO_LIMIT: Final = 1024


@dataclass(frozen=True, slots=True)
class PromptClass:
    """What of a prompt tells something about its answer.

    Attributes:
        effort: 1 to 100, 0 = does not think.
        turns: Messages of the assistant in the prompt, plus one.
    """

    effort: int
    tenant: str
    prompt_tokens: int
    tools: bool = False
    turns: int = 1

    def cells(self) -> tuple[CellKey, ...]:
        """Cells from coarse to fine."""
        effort = f"e{(self.effort + 9) // 10}"
        size = bisect_right(_LENGTH_CLASSES, self.prompt_tokens)
        turns = bisect_left(_TURN_CLASSES, self.turns)
        kind = f"p{size}{'t' if self.tools else 'n'}{turns}"
        who = f"u{self.tenant}"
        return (), (effort,), (effort, kind), (effort, who), (effort, who, kind)


@dataclass(frozen=True, slots=True)
class LengthSettings:
    """Of the length model.

    Attributes:
        coverage: Share of answers that the interval is meant to hold.
        window: Observations a cell remembers.
        pseudo_counts: Weight of the coarser cell in the finer one.
        correction: Step of the interval's correction at each answer.
    """

    coverage: float = 0.8
    window: float = 256.0
    pseudo_counts: float = 6.0
    correction: float = 0.02
    max_cells: int = 4096
    max_replicas: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.coverage < 1 or self.pseudo_counts <= 0 or not 0 <= self.correction < 0.5:
            raise ValueError(f"impossible settings: {self}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """How the forecasts fared: lately, and since the start.

    Attributes:
        recent_coverage: Share of answers inside their interval, over about the last 200.
        bias: Mean of log2(length / median forecast), over about the last 200; 0 = centred.
    """

    answers: int
    covered: int
    recent_coverage: float
    bias: float


class LengthModel:
    """Learns and forecasts. Bounded, has no clock; owned by one thread."""

    def __init__(self, settings: LengthSettings = LengthSettings()) -> None:
        self._settings = settings
        self._cells = Cells(
            limit=settings.max_cells, window=settings.window, max_replicas=settings.max_replicas
        )
        self._anything = _anything()
        self._units: Counts = np.eye(BINS)
        self._miss_rate: dict[int, float] = {}  # by effort class; what the interval leaves out at both ends
        self._memo: dict[tuple[CellKey, ...], LengthForecast] = {}
        self._news = 0
        self._answers = 0
        self._covered = 0
        self._recent = settings.coverage
        self._bias = 0.0

    def forecast(self, prompt: PromptClass) -> LengthForecast:
        """What is to be expected of an answer; a wide interval while little is known."""
        cells = prompt.cells()
        known = self._memo.get(cells)
        if known is not None:
            return known
        miss = self._miss_rate.get(_effort_class(prompt), 1 - self._settings.coverage)
        inner = [(index + 0.5) / _POINTS for index in range(_POINTS)]
        low, high, *points = quantiles(self._density(cells), [miss / 2, 1 - miss / 2, *inner])
        if len(self._memo) >= _MEMO_LIMIT:
            self._memo.clear()
        made = self._memo[cells] = LengthForecast(low, max(low, high), tuple(points))
        return made

    def observe(
        self, prompt: PromptClass, tokens: int, *, forecast: LengthForecast | None = None, cut: bool = False
    ) -> None:
        """Learn from a finished answer.

        Args:
            tokens: Sampled ids.
            forecast: What had been said of it; judges the interval.
            cut: It ended at its limit and would have gone on: what is known is that it is longer. Its weight goes to
                the longer lengths as they are expected now (redistribution to the right, Efron 1967).
        """
        if tokens < 1:
            return
        if forecast is not None and not cut:
            self._judge(prompt, tokens, forecast)
        cells, place = prompt.cells(), bin_of(tokens)
        density = self._units[place]
        if cut:
            longer = self._density(cells).copy()
            longer[:place] = 0.0
            density = longer / longer.sum()
        for key in cells:
            self._cells.add(key, density)
        self._news += 1
        if self._news % _MEMO_NEWS == 0:
            self._memo.clear()

    def snapshot(self, *, newest: int = 512) -> dict[CellKey, tuple[float, ...]]:
        """What this replica has counted, for ``merge`` at another one."""
        return self._cells.snapshot(newest=newest)

    def merge(self, replica: str, snapshot: CellSnapshot) -> None:
        """Count another replica's observations, in place of what it told before.

        Raises:
            ValueError: Not a snapshot of this version.
        """
        self._cells.merge(replica, snapshot)
        self._memo.clear()

    @property
    def calibration(self) -> Calibration:
        """How the forecasts fared."""
        return Calibration(self._answers, self._covered, self._recent, self._bias)

    @property
    def answers(self) -> int:
        """Answers that this replica has learnt from."""
        return self._news

    @property
    def cells(self) -> int:
        """Cells in use; bounded by ``max_cells``."""
        return len(self._cells)

    def _density(self, cells: tuple[CellKey, ...]) -> Counts:
        density = self._anything
        prior = self._settings.pseudo_counts
        for key in cells:
            counts, weight = self._cells.counts(key)
            if counts is not None:
                density = (counts + prior * density) / (weight + prior)
        return density

    def _judge(self, prompt: PromptClass, tokens: int, forecast: LengthForecast) -> None:
        inside = forecast.low <= tokens + 0.5 and tokens - 0.5 <= forecast.high
        goal = 1 - self._settings.coverage
        key = _effort_class(prompt)
        miss = self._miss_rate.get(key, goal) + self._settings.correction * (goal - (not inside))
        self._miss_rate[key] = min(max(miss, _MISS_LIMITS[0]), _MISS_LIMITS[1])
        self._answers += 1
        self._covered += inside
        self._recent += 0.005 * (inside - self._recent)
        middle = len(forecast.points) // 2
        median = (forecast.points[middle - 1] + forecast.points[middle]) / 2 if middle else forecast.points[0]
        self._bias += 0.005 * (float(np.log2(tokens / median)) - self._bias)


def _anything() -> Counts:
    """Before anything is known: every octave up to 8,192 tokens is as likely, each further one half as likely.

    Flat up to a million, the mean would be 70,000 tokens, and a router would count on that.
    """
    octaves = np.arange(BINS) / (bin_of(8192) / 13)
    density = np.exp2(-np.maximum(0.0, octaves - 13))
    return np.asarray(density / density.sum(), dtype=np.float64)


def _effort_class(prompt: PromptClass) -> int:
    return (prompt.effort + 9) // 10
