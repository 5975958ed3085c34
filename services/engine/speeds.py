"""What this worker's links and its model did lately, for the choice between fetching and computing."""

import threading
from typing import Final

from epdserve.kvstore.clock import Clock
from epdserve.services.policy.fetching import UNKNOWN, Speeds

_KEEP: Final = 0.8  # weight of what was known before
_FORGET_S: Final = 60.0  # a link that was slow once is tried again
_PREFILL: Final = "prefill"
_LATENCY: Final = "latency"


class SpeedMeter:
    """Moving averages; thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._figures: dict[str, tuple[float, float]] = {}  # value, when it was last measured

    def prefilled(self, rows: int, seconds: float) -> None:
        """So many prompt rows took a step of so many seconds."""
        self._note(_PREFILL, rows, seconds)

    def fetched(self, tier: str, nbytes: int, seconds: float) -> None:
        """So many bytes came from a tier, verified."""
        self._note(tier, nbytes, seconds)

    def waited(self, seconds: float) -> None:
        """The store took so long to answer a question."""
        self._set(_LATENCY, seconds)

    def speeds(self) -> Speeds:
        """As of now; what was not measured for a minute is unknown."""
        now = self._clock.monotonic()
        with self._lock:
            known = {name: value for name, (value, at) in self._figures.items() if now - at < _FORGET_S}
        prefill, latency = known.pop(_PREFILL, UNKNOWN), known.pop(_LATENCY, 0.0)
        return Speeds(prefill, known, latency)

    def _note(self, name: str, amount: int, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._set(name, amount / seconds)

    def _set(self, name: str, value: float) -> None:
        now = self._clock.monotonic()
        with self._lock:
            before = self._figures.get(name)
            if before is not None and now - before[1] < _FORGET_S:
                value = _KEEP * before[0] + (1 - _KEEP) * value
            self._figures[name] = (value, now)
