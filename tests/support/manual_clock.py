"""Time that stands until a test moves it."""

from __future__ import annotations


class ManualClock:
    """A ``Clock`` for tests."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
