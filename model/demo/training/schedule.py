"""The stages of the training run: what is practised, how long, at which rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from epdserve.model.demo.training import mixtures


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. Optimisers start anew in each.

    Attributes:
        tokens: Length of it at most.
        shapes: (length of a sequence, sequences) with the share of the steps that take it.
        mixture: Kinds of sequences and their shares.
        gaps: Share of the sequences whose positions jump.
        replays: Share of the sequences in which bounded replay narrows windows.
        rounds: Caches and weights are rounded as stored.
        indexer: Only the indexer learns, from the attention of the rest.
        selects: Attention sees what the indexer picks, and both learn.
        gate: Shares of right answers by task that end the stage early.
        sinkhorn_steps: Fewer than the config's, for speed; it matters little while mixing is near its start.
        frozen: Tensors whose names match this expression keep their values: fewer to update, less to disturb.
        renews: Attention that takes no part begins anew (``renewal.py``).
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
    frozen: str = ""
    renews: bool = False
    gate: Mapping[str, float] = field(default_factory=dict)


# Copying comes first, then dense look-ups, then documents, then everything: all at once does not get off the ground.
SCHEDULE: Final = (
    Stage(
        "copy",
        1_000_000,
        {"copy": 0.4, "stream": 0.5, "recall": 0.1},
        ((64, 16, 1.0),),
        warm_steps=15,
        cool=0.0,
        sinkhorn_steps=3,
        gate={"copy": 0.95, "stream": 0.9},
    ),
    Stage(
        "recall",
        700_000,
        {"stream": 0.15, "copy": 0.2, "recall": 0.4, "talk": 0.25},
        ((64, 16, 1.0), (128, 8, 2.0)),
        cool=0.0,
        sinkhorn_steps=3,
        gate={"copy": 0.95, "recall": 0.95},
    ),
    Stage(
        "hops",
        400_000,
        {
            "stream": 0.05,
            "distant": 0.4,
            "direct": 0.2,
            "json": 0.2,
            "copy": 0.1,
            "recall": 0.05,
            "talk": 0.1,
        },
        ((64, 24, 1.0), (128, 12, 1.5)),
        cool=0.0,
        sinkhorn_steps=3,
        gate={"direct": 0.9, "stream": 0.95},
    ),
    Stage("tasks", 450_000, mixtures.ALL, ((128, 16, 1.0), (256, 8, 1.5), (512, 4, 3.0)), cool=0.0),
    Stage(
        "long",
        350_000,
        mixtures.LONG,
        ((512, 4, 5.0), (1024, 2, 1.0)),
        gaps=0.7,
        replays=0.35,
        rounds=True,
        rate=0.01,
        adam_rate=2e-3,
        cool=0.6,
    ),
    Stage(
        "indexer", 60_000, mixtures.LONG, ((512, 4, 3.0), (1024, 2, 1.0)), rounds=True, gaps=0.5, indexer=True
    ),
    Stage(
        "picks",
        100_000,
        mixtures.LONG,
        ((512, 4, 3.0), (1024, 2, 1.0)),
        rate=0.004,
        adam_rate=8e-4,
        cool=1.0,
        gaps=0.5,
        replays=0.35,
        rounds=True,
        selects=True,
    ),
    Stage(
        "settle",
        280_000,
        mixtures.ALL,
        ((256, 8, 1.0), (512, 4, 3.0)),
        rate=0.014,
        adam_rate=2.5e-3,
        cool=0.7,
        gaps=0.4,
        replays=0.2,
        rounds=True,
        sinkhorn_steps=3,
    ),
    Stage(
        "indexer again",
        320_000,
        mixtures.LONG,
        ((512, 4, 3.0), (1024, 2, 1.0)),
        rounds=True,
        gaps=0.5,
        indexer=True,
    ),
    Stage(
        "picks again",
        110_000,
        mixtures.LONG,
        ((512, 4, 3.0), (1024, 2, 1.0)),
        rate=0.003,
        adam_rate=6e-4,
        cool=1.0,
        gaps=0.5,
        replays=0.35,
        rounds=True,
        selects=True,
    ),
    Stage(
        "drills",
        157_000,
        mixtures.DRILLS,
        ((64, 24, 1.0), (128, 12, 1.5)),
        cool=0.0,
        sinkhorn_steps=3,
    ),
    Stage(
        "second hop",
        376_000,
        mixtures.DRILLS,
        ((64, 32, 1.0), (128, 16, 1.0)),
        cool=0.0,
        sinkhorn_steps=3,
        frozen=r"\.ffn\.|engram",
        renews=True,
        gate={"argument": 0.95, "json": 0.95, "words": 0.95},
    ),
    Stage(
        "templates",
        350_000,
        mixtures.EVERYTHING,
        ((128, 16, 1.0), (256, 8, 2.0), (512, 4, 1.0)),
        rate=0.015,
        cool=0.0,
        sinkhorn_steps=3,
        frozen=r"\.ffn\.|engram",
    ),
    Stage(
        "answers",
        520_000,
        {
            **mixtures.EVERYTHING,
            "json": 0.22,
            "words": 0.14,
            "thinking": 0.2,
            "distant": 0.0,
            "calls": 0.04,
            "forms": 0.25,
        },
        ((128, 16, 1.0), (256, 8, 2.0), (512, 4, 1.5)),
        rate=0.012,
        cool=0.0,
        sinkhorn_steps=3,
        frozen=r"\.experts\.|engram",
    ),
    Stage(
        "far",
        420_000,
        mixtures.FAR,
        ((256, 8, 1.0), (512, 4, 3.0), (1024, 2, 1.0)),
        rate=0.012,
        adam_rate=2e-3,
        cool=0.8,
        sinkhorn_steps=3,
        frozen=r"\.experts\.|engram",
        gaps=0.6,
        replays=0.25,
        rounds=True,
    ),
    Stage(
        "indexer anew",
        100_000,
        mixtures.FAR,
        ((512, 4, 2.0), (1024, 2, 1.0)),
        rounds=True,
        gaps=0.5,
        indexer=True,
    ),
    Stage(
        "picks anew",
        178_000,
        mixtures.POLISH,
        ((256, 8, 2.0), (512, 4, 3.0), (1024, 2, 1.0)),
        rate=0.006,
        adam_rate=1.2e-3,
        cool=1.0,
        gaps=0.25,
        replays=0.15,
        frozen=r"\.experts\.|engram",
        rounds=True,
        selects=True,
    ),
    Stage(
        "finish",
        190_000,
        mixtures.FINISH,
        ((128, 16, 1.0), (256, 8, 2.0), (512, 4, 2.0)),
        rate=0.004,
        adam_rate=1e-3,
        cool=1.0,
        frozen=r"\.experts\.|engram",
        gaps=0.05,
        replays=0.1,
        rounds=True,
        selects=True,
    ),
    Stage(
        "weak",
        400_000,
        mixtures.WEAK,
        ((128, 16, 1.0), (256, 8, 3.0), (512, 4, 1.0)),
        rate=0.01,
        adam_rate=1.5e-3,
        cool=0.3,
        sinkhorn_steps=3,
        frozen=r"\.experts\.|engram",
        gaps=0.1,
        replays=0.1,
        rounds=True,
        selects=True,
    ),
    Stage(
        "reach",
        450_000,
        mixtures.REACH,
        ((256, 8, 2.0), (512, 4, 2.0), (1024, 2, 2.0), (2048, 1, 1.5)),
        rate=0.006,
        adam_rate=1e-3,
        cool=1.0,
        frozen=r"\.experts\.|engram",
        gaps=0.4,
        replays=0.15,
        rounds=True,
        selects=True,
    ),
)
