"""Whether a request may enter, and when to come back if not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_LONGEST_RETRY_S: Final = 60


@dataclass(frozen=True, slots=True)
class AdmissionLoad:
    """What is inside now.

    Attributes:
        requests: Requests in flight.
        tokens: Their prompt tokens.
        mean_stay_s: How long a request has lately stayed inside; 0 if none has left yet.
    """

    requests: int
    tokens: int
    mean_stay_s: float


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How much may be inside."""

    max_requests: int
    max_tokens: int

    def __post_init__(self) -> None:
        if self.max_requests < 1 or self.max_tokens < 1:
            raise ValueError(f"limits must be >= 1: {self}")


def retry_after_s(load: AdmissionLoad, limits: AdmissionLimits, *, prompt_tokens: int) -> int | None:
    """Seconds to wait before asking again, or None if the request may enter now.

    An empty house takes any prompt: a limit below the longest context must not refuse that context for ever.
    With n requests that stay s seconds, one leaves every s / n; that is when a place is next free.
    """
    fits_tokens = load.tokens + prompt_tokens <= limits.max_tokens or load.requests == 0
    if load.requests < limits.max_requests and fits_tokens:
        return None
    next_leaves_s = load.mean_stay_s / max(1, load.requests)
    return min(_LONGEST_RETRY_S, max(1, math.ceil(next_leaves_s)))
