"""What is asked of the simulated cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Targets:
    """What a class of requests wants."""

    name: str
    ttft_s: float
    tpot_s: float
    room: float


INTERACTIVE: Final = Targets("interactive", 2.0, 0.05, 1.0)
STANDARD: Final = Targets("standard", 6.0, 0.08, 1.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload.

    Attributes:
        blocks: Numbers of the prompt's full blocks; two prompts share a prefix exactly as far as these agree.
        answer_blocks: Those of the prompt with its answer, as the next turn has them; empty if there is none.
        output_tokens: What the answer takes at the effort asked for.
        floor: Lowest effort the client takes instead of a 429; = ``effort`` if it takes none.
    """

    number: int
    arrives_at: float
    tenant: str
    session: int
    turn: int
    tools: bool
    targets: Targets
    effort: int
    floor: int
    prompt_tokens: int
    blocks: tuple[int, ...]
    answer_blocks: tuple[int, ...]
    output_tokens: int

    def output_at(self, effort: int) -> int:
        """What the answer takes at another effort."""
        return max(1, round(self.output_tokens * effort_ratio(effort) / effort_ratio(self.effort)))


def effort_ratio(effort: int) -> float:
    """Output at an effort over that at 75: doubles every 25 (the report: half the tokens at 60 to 80 of 100)."""
    return float(2.0 ** ((effort - 75) / 25))
