"""The stages of the training run: what is practised, how long, at which rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. Optimisers start anew in each.

    Attributes:
        tokens: Length of it.
        shapes: (length of a sequence, sequences) with the share of the steps that take it.
        mixture: Kinds of sequences and their shares.
        gaps: Share of the sequences whose positions jump.
        replays: Share of the sequences in which bounded replay narrows windows.
        rounds: Caches and weights are rounded as stored.
        indexer: Only the indexer learns, from the attention of the rest.
        sinkhorn_steps: Fewer than the config's, for speed; it matters little while mixing is near its start.
        cool: Share of the stage at its end over which the rates fall to nothing.
    """

    name: str
    tokens: int
    mixture: Mapping[str, float]
    shapes: tuple[tuple[int, int, float], ...] = ((64, 32, 1.0),)
    rate: float = 0.02
    adam_rate: float = 3e-3
    warm_steps: int = 15
    cool: float = 0.3
    sinkhorn_steps: int | None = None
    gaps: float = 0.0
    replays: float = 0.0
    rounds: bool = False
    indexer: bool = False
    selects: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """All stages, in order."""

    stages: tuple[Stage, ...] = field(default_factory=tuple)


SCHEDULE: Final = Schedule(
    (
        Stage(
            "copy",
            400_000,
            {"copy": 0.55, "stream": 0.3, "recall": 0.15},
            warm_steps=30,
            cool=0.0,
            sinkhorn_steps=3,
        ),
    )
)
