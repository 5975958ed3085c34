"""Which waiting prompt a prefill worker takes next, chunk by chunk; and which decode request gives way.

Shortest first serves most requests in time, deadlines first starves none: the score is the work left times the part
of the target that is left, so that a short prompt passes a long one, until the long one's time runs out. What can no
longer make its target lets the others pass, but not for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from epdserve.services.policy.fairness import FAIR_SLACK
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.schedule import HIGHEST_PRIORITY

# What a request is taken to be promised if nobody said; any value keeps the order among those that say nothing
USUAL_TARGET_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt that is not finished.

    Attributes:
        left_s: Seconds of work it still needs.
        priority: Higher first; counts only for a tenant within its share.
        excess: What its tenant has had lately over its fair share, less one.
    """

    request_id: str
    arrived_at: float
    target_s: float
    left_s: float
    priority: int = 0
    excess: float = 0.0


def next_prompt(waiting: Sequence[WaitingPrompt], *, now: float, patience: float = 4.0) -> str:
    """The one to work on.

    Args:
        patience: After so many times its target, a prompt goes before all others.

    Raises:
        ValueError: None waits.
    """
    if not waiting:
        raise ValueError("no prompt waits")
    return min(waiting, key=lambda one: rank(one, now=now, patience=patience)).request_id


def rank(prompt: WaitingPrompt, *, now: float, patience: float = 4.0) -> tuple[int, float, float, str]:
    """What waiting prompts are sorted by: the starved, then by priority, then by ``urgency``; then age and name."""
    score = urgency(
        arrived_at=prompt.arrived_at,
        target_s=prompt.target_s,
        left_s=prompt.left_s,
        now=now,
        patience=patience,
        excess=prompt.excess,
    )
    if score < 0:
        return -HIGHEST_PRIORITY - 1, score, prompt.arrived_at, prompt.request_id
    # A tenant above its share may not buy itself back in
    priority = prompt.priority if prompt.excess <= FAIR_SLACK else min(0, prompt.priority)
    return -priority, score, prompt.arrived_at, prompt.request_id


def urgency(
    *,
    arrived_at: float,
    target_s: float,
    left_s: float,
    now: float,
    patience: float = 4.0,
    excess: float = 0.0,
) -> float:
    """Lower goes first: -1 and below for the starved, the work left times the time left, then what is late anyway.

    A tenant above its share has its scores stretched: as if its prompts were that much longer.
    """
    waited_s = now - arrived_at
    if waited_s > patience * target_s:
        return -1.0 - waited_s
    slack_s = target_s - waited_s - left_s
    if slack_s < 0:
        # Behind everything that can still be in time; the nearly done first
        return 1e9 + left_s
    return left_s * slack_s / target_s * (1 + max(0.0, excess))


@dataclass(frozen=True, slots=True)
class Running:
    """A request that decodes.

    Attributes:
        context_tokens: Tokens whose KV it holds.
        done_tokens: Output so far.
    """

    request_id: str
    context_tokens: int
    done_tokens: int
    forecast: LengthForecast
    priority: int = 0


def preemption_victim(running: Sequence[Running]) -> str:
    """Whom to take out when pages run out: the one whose ``keeping`` is least, by name on a tie.

    Raises:
        ValueError: None runs.
    """
    if not running:
        raise ValueError("nobody to preempt")
    return min(running, key=lambda one: (keeping(one), one.request_id)).request_id


def keeping(one: Running) -> tuple[int, float]:
    """What a request is worth where it is: its priority, then what taking it out would cost for what it would free.

    Taking a request out costs bringing its context back; leaving it in holds its pages for as long as it is expected
    to go on. So the cheapest victim is the one with the longest expected rest, per token to be brought back.
    """
    rest = one.forecast.remaining(one.done_tokens)
    freed = one.context_tokens * rest + rest * rest / 2
    return one.priority, -freed / max(1, one.context_tokens)
