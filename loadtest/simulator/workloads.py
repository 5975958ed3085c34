"""Workloads from a seed, in the shape of four public traces; or those traces themselves, where they lie.

The shapes were fitted by hand to medians, means and tails of the Mooncake traces (FAST '25) and of Azure's LLM
inference trace of 2023. No prompt is in them: lengths, times and which blocks are shared. Tenants, efforts, classes and
tools are ours in either case: the traces have none.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from epdserve.loadtest.simulator.requests import BLOCK_TOKENS, INTERACTIVE, STANDARD, Request, effort_ratio

EFFORTS: Final = (25, 50, 75, 100)
_TENANTS: Final = ("t0", "t1", "t2", "t3", "t4", "t5")


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of traffic.

    Attributes:
        first_tokens, turn_tokens, answer_tokens: (median, sigma) of log-normal lengths: of a session's first prompt, of
            what a turn adds to it, of an answer at effort 75.
        shared_tokens: A tenant's common beginning of every session.
        turns: Mean turns of a session.
        think_s: Mean pause between an answer and the next turn.
    """

    name: str
    first_tokens: tuple[float, float]
    turn_tokens: tuple[float, float]
    answer_tokens: tuple[float, float]
    shared_tokens: int
    turns: float
    think_s: float
    tools: bool
    trace: str


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape(
            "conversation",
            (5500, 1.15),
            (900, 1.3),
            (300, 0.6),
            1024,
            2.2,
            12.0,
            False,
            "mooncake_conversation",
        ),
        Shape("agent", (5500, 1.2), (1500, 1.0), (70, 1.2), 2048, 4.0, 3.0, True, "mooncake_synthetic"),
        Shape("code", (1450, 0.85), (300, 0.8), (13, 1.1), 512, 1.3, 8.0, True, "azure_code"),
        Shape("chat", (800, 0.75), (250, 0.9), (150, 0.8), 256, 1.6, 10.0, False, "azure_conv"),
    )
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Who asks, and for what.

    Attributes:
        tenant_skew: Weight of tenant k is 1 / (k + 1) ** skew.
        floor_ratio: Share of sessions that take a lower effort instead of a 429.
        standard_ratio: Share of sessions of the looser class.
    """

    tenant_skew: float = 0.7
    floor_ratio: float = 0.3
    standard_ratio: float = 0.3

    def session(self, rng: random.Random) -> tuple[str, int, int, bool]:
        """Tenant, effort, floor, and whether it is of the looser class."""
        weights = [(index + 1) ** -self.tenant_skew for index in range(len(_TENANTS))]
        tenant = rng.choices(_TENANTS, weights)[0]
        effort = rng.choice(EFFORTS)
        floor = 25 if rng.random() < self.floor_ratio else effort
        return tenant, effort, min(floor, effort), rng.random() < self.standard_ratio


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        warm: Chains that earlier turns have left in the machines' stores.
    """

    requests: Sequence[Request]
    warm: Sequence[tuple[int, ...]] = ()


def generate(shape: Shape, *, seconds: float, rate: float, seed: int, mix: Mix = Mix()) -> Workload:
    """A workload of a shape at ``rate`` requests a second; sessions have been coming for long when it begins."""
    rng = random.Random(f"{shape.name} {seed}")
    blocks = _Blocks()
    made: list[Request] = []
    warm: list[tuple[int, ...]] = []
    earlier_s = 2.5 * shape.turns * (shape.think_s + 5.0)
    at, session = -earlier_s, 0
    while at < seconds:
        at += rng.expovariate(rate / shape.turns)
        session += 1
        for one in _session(shape, mix, rng, at, session, blocks):
            if 0 <= one.arrives_at < seconds:
                made.append(one)
            elif one.arrives_at < 0:
                warm.append(one.answer_blocks)
    made.sort(key=lambda one: one.arrives_at)
    # What is old was evicted, or will not be asked for again: sessions end
    return Workload([replace(one, number=number) for number, one in enumerate(made)], warm)


def load_trace(
    path: Path, shape: Shape, *, seconds: float, rate: float, seed: int, mix: Mix = Mix()
) -> Workload:
    """Rows of a public trace from a place that the seed chooses, sped up or slowed down to ``rate``.

    Raises:
        OSError, ValueError: Not there, or not such a trace.
    """
    rng = random.Random(f"{shape.name} {seed}")
    rows = list(_rows(path))
    requests = min(len(rows), max(2, round(seconds * rate)))
    start = rng.randrange(max(1, len(rows) - requests))
    warm = [ids for _, _, _, ids in rows[max(0, start - 2 * requests) : start] if ids]
    rows = rows[start : start + requests]
    span_s = max(1e-9, rows[-1][0] - rows[0][0])
    own = _Blocks()
    made = []
    sessions: dict[int, tuple[str, int, int, bool]] = {}
    for number, (at_s, prompt, output, ids) in enumerate(rows):
        blocks = ids or own.fresh(prompt // BLOCK_TOKENS)
        session = ids[min(2, len(ids) - 1)] if ids else number
        tenant, effort, floor, loose = sessions.setdefault(session, mix.session(rng))
        made.append(
            Request(
                number,
                (at_s - rows[0][0]) / span_s * len(rows) / rate,
                tenant,
                session,
                1,
                shape.tools,
                STANDARD if loose else INTERACTIVE,
                effort,
                floor,
                max(1, prompt),
                tuple(blocks[: prompt // BLOCK_TOKENS]),
                (),
                max(1, round(output * effort_ratio(effort))),
            )
        )
    return Workload(made, warm)


def trace_rate(path: Path) -> float:
    """Requests a second of a trace as it was recorded.

    Raises:
        OSError, ValueError: Not there, or not such a trace.
    """
    times = [row[0] for row in _rows(path)]
    if len(times) < 2 or times[-1] <= times[0]:
        raise ValueError(f"{path} has no rate")
    return (len(times) - 1) / (times[-1] - times[0])


class _Blocks:
    """Numbers for blocks that nobody else has, and tenants' common beginnings."""

    def __init__(self) -> None:
        self._next = 0
        self._shared: dict[str, tuple[int, ...]] = {}

    def fresh(self, count: int) -> tuple[int, ...]:
        self._next += count
        return tuple(range(self._next - count, self._next))

    def shared(self, tenant: str, count: int) -> tuple[int, ...]:
        if tenant not in self._shared:
            self._shared[tenant] = self.fresh(count)
        return self._shared[tenant]


def _session(
    shape: Shape, mix: Mix, rng: random.Random, at: float, first: int, blocks: _Blocks
) -> Iterator[Request]:
    tenant, effort, floor, loose = mix.session(rng)
    own_ratio = 0.6 + 0.2 * _TENANTS.index(tenant)  # tenants differ in how long their answers are
    prompt = shape.shared_tokens + _log_normal(rng, shape.first_tokens)
    chain = list(blocks.shared(f"{tenant} {effort}", shape.shared_tokens // BLOCK_TOKENS))
    turn = 1
    while True:
        output = round(_log_normal(rng, shape.answer_tokens) * own_ratio * effort_ratio(effort))
        prompt, output = min(prompt, 250_000), max(1, min(output, 32_000))
        chain.extend(blocks.fresh(max(0, prompt // BLOCK_TOKENS - len(chain))))
        held = tuple(chain)
        chain.extend(blocks.fresh(max(0, (prompt + output) // BLOCK_TOKENS - len(chain))))
        yield Request(
            *(
                0,
                at,
                tenant,
                first,
                turn,
                shape.tools,
                STANDARD if loose else INTERACTIVE,
                effort,
                floor,
                prompt,
            ),
            *(held, tuple(chain), output),
        )
        if rng.random() < 1 / shape.turns:
            return
        at += 0.5 + output * 0.03 + rng.expovariate(1 / shape.think_s)
        prompt += output + _log_normal(rng, shape.turn_tokens)
        turn += 1


def _log_normal(rng: random.Random, parameters: tuple[float, float]) -> int:
    median, sigma = parameters
    return max(1, round(median * math.exp(rng.gauss(0.0, sigma))))


def _rows(path: Path) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        if ".jsonl" in path.name:
            for line in lines:
                row = json.loads(line)
                yield (
                    row["timestamp"] / 1000,
                    row["input_length"],
                    row["output_length"],
                    tuple(row["hash_ids"]),
                )
            return
        parse: Callable[[str], datetime] = datetime.fromisoformat
        for fields in csv.DictReader(lines):
            at_s = parse(fields["TIMESTAMP"][:26]).timestamp()
            yield at_s, int(fields["ContextTokens"]), int(fields["GeneratedTokens"]), ()
