"""How urgent a request is, and how long it is expected to stay: what workers order by. A frozen value, no behaviour."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

HIGHEST_PRIORITY: Final = 100
# Equally likely lengths that travel with a job
MAX_LENGTHS: Final = 64


@dataclass(frozen=True, slots=True)
class Schedule:
    """Durations, never times of day: the clocks of two machines may be seconds apart.

    Attributes:
        target_s: From the client's request to its first token, as promised; 0 = nothing was.
        waited_s: How much of that had passed when the job was sent.
        priority: Higher goes first, within ``HIGHEST_PRIORITY`` on either side of 0.
        excess: What the tenant has had lately over its fair share, less one; above 0 it goes behind the others.
        lengths: Equally likely numbers of output tokens, ascending; empty = nothing is known.
    """

    target_s: float = 0.0
    waited_s: float = 0.0
    priority: int = 0
    excess: float = 0.0
    lengths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = (self.target_s, self.waited_s, self.excess, *self.lengths)
        if not all(map(math.isfinite, numbers)) or min(self.target_s, self.waited_s) < 0:
            raise ValueError(f"impossible schedule: {self}")
        if abs(self.priority) > HIGHEST_PRIORITY:
            raise ValueError(
                f"priority must lie in -{HIGHEST_PRIORITY}..{HIGHEST_PRIORITY}, got {self.priority}"
            )
        if len(self.lengths) > MAX_LENGTHS or min(self.lengths, default=0.0) < 0:
            raise ValueError(f"at most {MAX_LENGTHS} lengths, none below 0")


UNHURRIED: Final = Schedule()
