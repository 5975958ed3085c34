"""From outcomes to figures. Percentiles are nearest-rank: each one is a value that was measured."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epdserve.loadtest.client import Outcome


@dataclass(frozen=True, slots=True)
class Spread:
    """A few percentiles of one quantity, in the quantity's unit."""

    p50: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """The spread of the values that are there; None if none is."""
        ordered = sorted(value for value in values if value is not None)
        if not ordered:
            return None
        return cls(*(percentile(ordered, rank) for rank in (50, 90, 99, 100)))


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of the load test."""

    requests: int
    failed: int
    elapsed_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    tokens_per_s: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    errors: tuple[str, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Figures":
        """Figures of one run.

        Args:
            outcomes: At least one.

        Raises:
            ValueError: There is none.
        """
        if not outcomes:
            raise ValueError("no outcomes")
        good = [outcome for outcome in outcomes if outcome.ok]
        elapsed_s = max(o.ended_at for o in outcomes) - min(o.sent_at for o in outcomes)
        completion = sum(outcome.completion_tokens for outcome in good)
        return cls(
            requests=len(outcomes),
            failed=len(outcomes) - len(good),
            elapsed_s=elapsed_s,
            prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
            cached_tokens=sum(int(outcome.usage.get("prompt_cache_hit_tokens", 0)) for outcome in good),
            completion_tokens=completion,
            tokens_per_s=completion / elapsed_s if elapsed_s > 0 else math.nan,
            ttft_ms=Spread.of(_ms(outcome.ttft_s) for outcome in good),
            itl_ms=Spread.of(_ms(outcome.itl_s) for outcome in good),
            errors=tuple(
                sorted({outcome.error or "no end of stream" for outcome in outcomes if not outcome.ok})
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """The same, for machines."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """The same, for people: name and value."""
        rows = [
            ("requests", f"{self.requests} ({self.failed} failed) in {self.elapsed_s:.2f} s"),
            ("prompt tokens", f"{self.prompt_tokens} ({self.cached_tokens} cached)"),
            ("answer tokens", f"{self.completion_tokens}, {self.tokens_per_s:.1f} a second"),
        ]
        for name, spread in (("TTFT ms", self.ttft_ms), ("ITL ms", self.itl_ms)):
            if spread:
                rows.append((name, f"p50 {spread.p50:.1f}, p90 {spread.p90:.1f}, p99 {spread.p99:.1f}"))
        return rows + [("error", error) for error in self.errors]


def percentile(ordered: Sequence[float], rank: float) -> float:
    """Nearest-rank percentile of an ascending, non-empty sequence; ``rank`` in (0, 100]."""
    return ordered[max(0, math.ceil(len(ordered) * rank / 100) - 1)]


def decode_rate(streams: Sequence[tuple[Sequence[float], int]]) -> float:
    """Tokens a second while all streams decode together: from the last one's first text to the first one's last.

    Before and after that, fewer streams share the steps, and prompts are still being read.

    Args:
        streams: For each one the times at which text came, at least two, and its number of tokens. Where a piece of
            text holds several tokens, they count evenly over the pieces.

    Raises:
        ValueError: The streams did not run together.
    """
    began, ended = max(times[0] for times, _ in streams), min(times[-1] for times, _ in streams)
    if ended <= began:
        raise ValueError(
            f"streams did not overlap: the last one began {began - ended:.3f} s after the first had ended"
        )
    tokens = 0.0
    for times, count in streams:
        pieces = sum(began < at <= ended for at in times)
        tokens += pieces * (count - 1) / (len(times) - 1)
    return tokens / (ended - began)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
