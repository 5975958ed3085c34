"""How long an answer may get: a distribution kept as a few equally likely lengths, and what follows from it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

# A request that has outlived every likely length goes on for about this share of what it has done
_OVERTIME_RATIO: Final = 0.25


@dataclass(frozen=True, slots=True)
class LengthForecast:
    """Expected output tokens of one request.

    Attributes:
        low, high: Ends of the interval that is meant to hold four answers of five.
        points: Equally likely lengths, ascending.
    """

    low: float
    high: float
    points: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.points or not 0 < self.low <= self.high:
            raise ValueError(f"impossible forecast: {self}")

    @property
    def mean(self) -> float:
        """Expected length."""
        return sum(self.points) / len(self.points)

    def capped(self, max_tokens: int) -> LengthForecast:
        """The forecast of a request that may produce no more than ``max_tokens``."""
        cap = float(max(1, max_tokens))
        if self.high <= cap and self.points[-1] <= cap:
            return self
        below = bisect_left(self.points, cap)
        capped = self.points[:below] + (cap,) * (len(self.points) - below)
        return LengthForecast(min(self.low, cap), min(self.high, cap), capped)

    def scaled(self, ratio: float) -> LengthForecast:
        """All lengths times ``ratio``."""
        return LengthForecast(
            max(1.0, self.low * ratio),
            max(1.0, self.high * ratio),
            tuple(max(1.0, point * ratio) for point in self.points),
        )

    def remaining(self, done_tokens: int) -> float:
        """Expected tokens still to come, given that ``done_tokens`` came and it has not ended."""
        left = [point - done_tokens for point in self.points if point > done_tokens]
        if not left:
            return max(1.0, _OVERTIME_RATIO * done_tokens)
        return sum(left) / len(left)


def fixed(tokens: float) -> LengthForecast:
    """A length that is taken for certain: what a router without a model counts on."""
    sure = max(1.0, tokens)
    return LengthForecast(sure, sure, (sure,))


def byte_seconds(
    forecast: LengthForecast,
    *,
    prompt_tokens: int,
    bytes_per_token: float,
    s_per_token: float,
    done_tokens: int = 0,
) -> float:
    """KV bytes times seconds that a request is expected to hold from now on in a decode worker.

    A request with a context of c tokens that makes r more, one every s seconds, holds the integral of c + t / s over
    r * s seconds: (c r + r^2 / 2) s tokens times seconds. The mean is taken over the likely lengths and not of the
    mean length: r^2 makes the long answers count.
    """
    context = prompt_tokens + done_tokens
    left = [point - done_tokens for point in forecast.points if point > done_tokens]
    if not left:
        left = [forecast.remaining(done_tokens)]
    token_seconds = sum(context * more + more * more / 2 for more in left) / len(left) * s_per_token
    return token_seconds * bytes_per_token
