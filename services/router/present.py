"""What is inside a router now and what went wrong lately, for an administrator who looks. No prompt is kept."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from epdserve.services.errors import ServiceError
from epdserve.services.router.request import Trail, now
from epdserve.services.types import Effort
from prometheus_client import Counter as MetricCounter

_ERRORS: Final = 50
_MESSAGE_CHARS: Final = 300
_SHOWN: Final = 200
_SAMPLES: Final = 240
_EFFORT_STEP: Final = 10


@dataclass(frozen=True, slots=True)
class Inside:
    """One request that is being answered."""

    name: str
    path: str
    tenant: str
    trail: Trail

    def stage(self) -> str:
        """How far it is: read, place, prefill, hand-off, decode."""
        trail = self.trail
        if trail.first_token_at:
            return "decode"
        if trail.prefilled_at:
            return "hand-off"
        if trail.placed_at:
            return "prefill"
        return "place" if trail.body_at else "read"


class Present:
    """Owned by the event loop; every collection has a bound."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._inside: dict[int, Inside] = {}
        self._errors: deque[dict[str, Any]] = deque(maxlen=_ERRORS)
        self._asked: Counter[int] = Counter()
        self._granted: Counter[int] = Counter()
        self._tiers: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)

    def inside(self, name: str, path: str, tenant: str, trail: Trail) -> Presence:
        """A request is inside until the block ends."""
        return Presence(self._inside, next(self._numbers), Inside(name, path, tenant, trail))

    def failed(self, name: str, path: str, error: ServiceError, *, at: float) -> None:
        """A request ended badly; ``at`` is the time of day."""
        self._errors.appendleft(
            {
                "at": at,
                "request": name,
                "path": path,
                "code": error.code,
                "message": error.message[:_MESSAGE_CHARS],
                "worker": error.worker,
            }
        )

    def effort(self, asked: Effort, granted: Effort) -> None:
        """A request that thinks was let in."""
        self._asked[_step(asked)] += 1
        self._granted[_step(granted)] += 1

    def sample_tiers(self, tokens: MetricCounter, *, at: float) -> None:
        """Note where prompt tokens have come from so far."""
        by_source = {
            sample.labels["source"]: sample.value
            for metric in tokens.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }
        self._tiers.append({"at": at, "tokens": by_source})

    def told(self) -> Mapping[str, Any]:
        """All of it, as JSON values; of requests the oldest."""
        shown = list(itertools.islice(self._inside.values(), _SHOWN))
        return {
            "inside": [_request(one) for one in shown],
            "inside_count": len(self._inside),
            "errors": list(self._errors),
            "efforts": {"asked": _histogram(self._asked), "granted": _histogram(self._granted)},
            "tiers": list(self._tiers),
        }


class Presence:
    """One request inside, as a context."""

    __slots__ = ("_inside", "_number", "_one")

    def __init__(self, inside: dict[int, Inside], number: int, one: Inside) -> None:
        self._inside, self._number, self._one = inside, number, one

    def __enter__(self) -> None:
        self._inside[self._number] = self._one

    def __exit__(self, *_: object) -> None:
        del self._inside[self._number]


def _request(one: Inside) -> dict[str, Any]:
    trail = one.trail
    return {
        "request": one.name,
        "path": one.path,
        "tenant": one.tenant,
        "stage": one.stage(),
        "age_s": round(now() - trail.received_at, 3),
        "tokens": len(trail.drawn),
        "cached": trail.cached_tokens,
        "prefill": trail.prefill_worker,
        "decode": trail.decode_worker,
        "moves": trail.retries + trail.resumes + trail.handovers,
    }


def _step(effort: Effort) -> int:
    return (effort.level - 1) // _EFFORT_STEP


def _histogram(counts: Counter[int]) -> list[int]:
    """Counts of levels 1-10, 11-20, ... 91-100."""
    return [counts[step] for step in range(100 // _EFFORT_STEP)]
