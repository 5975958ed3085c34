"""Whether a request enters now, enters with less effort, or is told when to come back: by what it is expected to see.

A request that is expected to miss its targets would also make others miss theirs, so it is refused before any work is
spent on it. Classes differ in how much of the room they may use: those that are shed first are refused while the
strictest class still meets its targets. Tenants above their fair share give way before those below (``fairness.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from epdserve.services.policy.fairness import FAIR_SLACK
from epdserve.services.policy.forecast import LengthForecast


@dataclass(frozen=True, slots=True)
class SloClass:
    """What a class of requests is promised, and how soon it is shed.

    Attributes:
        room: Share of the targets' room that it may use up: 1 = until its own targets would be missed; a class with
            0.5 is refused from half of that on.
    """

    name: str
    ttft_s: float
    tpot_s: float
    room: float = 1.0

    def __post_init__(self) -> None:
        if min(self.ttft_s, self.tpot_s, self.room) <= 0:
            raise ValueError(f"targets and room must be positive: {self}")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a request is expected to see at the place that was found for it.

    Attributes:
        drain_ratio: Share of the work done lately that was not replaced by new work: how fast queues would shrink if
            arrivals stayed as they are, at least what refusing frees. 1 = nothing arrives.
        alone_ttft_s: Of ``ttft_s``, what it would see if nobody else were there.
        excess: What its tenant has had lately over its fair share, less one (``ServiceMeter.excess``).
        hit_tokens: Prompt tokens that need not be computed, at the effort asked for.
        prefill_tokens_per_s: Of the worker found.
    """

    ttft_s: float
    tpot_s: float
    drain_ratio: float = 1.0
    alone_ttft_s: float = 0.0
    excess: float = 0.0
    hit_tokens: int = 0
    prefill_tokens_per_s: float = 1.0


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Of the gate.

    Attributes:
        ttft_margin, tpot_margin: A target counts as missed from this multiple of it on; above 1 for expectations that
            err on the dark side.
        fair_slack: What a tenant may have had beyond its share before it counts, as a share of it.
        own_gain, wait_gain: How much dearer its prompts' own time and the queue in front of them are for each share
            that it has had beyond that; 0 = shares do not count.
        tpot_gain: How much dearer its tokens are, for the square of it: a little above a share costs next to nothing,
            a multiple of it everything.
        calm: Where others hold up no more than this share of a target, shares do not count either.
        longest_retry_s: Nobody is sent away for longer.
    """

    ttft_margin: float = 1.0
    tpot_margin: float = 1.0
    fair_slack: float = FAIR_SLACK
    own_gain: float = 30.0
    wait_gain: float = 1.5
    tpot_gain: float = 0.02
    calm: float = 0.1
    longest_retry_s: float = 60.0


class Verdict(StrEnum):
    """What the gate says."""

    ENTER = "enter"
    LESS_EFFORT = "less_effort"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Answer:
    """The gate's answer.

    Attributes:
        pressure: Greatest of expected over promised; 1 = just at a target.
        retry_after_s: When the same request is expected to enter, if it is refused.
    """

    verdict: Verdict
    pressure: float
    retry_after_s: float = 0.0
    reason: str = ""


def decide(
    outlook: Outlook, slo: SloClass, *, may_lower: bool = False, settings: GateSettings = GateSettings()
) -> Answer:
    """Say whether a request enters.

    Args:
        may_lower: The client allows a lower effort, and it pays (``lowering_pays``).
    """
    ttft_share = outlook.ttft_s / (slo.ttft_s * settings.ttft_margin)
    tpot_share = outlook.tpot_s / (slo.tpot_s * settings.tpot_margin)
    pressure, limit = max(ttft_share, tpot_share), slo.room
    reason = "ttft" if ttft_share >= tpot_share else "tpot"
    if pressure <= limit:
        alone_share = outlook.alone_ttft_s / (slo.ttft_s * settings.ttft_margin)
        calm = max(ttft_share - alone_share, tpot_share) <= settings.calm
        ttft_share, tpot_share = _dearer(outlook.excess, ttft_share, alone_share, tpot_share, settings)
        reason = "share"
        if calm or max(ttft_share, tpot_share) <= limit:
            return Answer(Verdict.ENTER, pressure)
    # Less output shortens no queue of prompts
    if may_lower and tpot_share > limit >= ttft_share:
        return Answer(Verdict.LESS_EFFORT, pressure, reason=reason)
    # Until the same request would pass: what is too much, at the speed queues shrink
    excess_s = (max(ttft_share, tpot_share) - limit) * slo.ttft_s * settings.ttft_margin
    wait_s = math.ceil(excess_s / min(1.0, max(0.05, outlook.drain_ratio)))
    return Answer(Verdict.REFUSE, pressure, float(min(settings.longest_retry_s, max(1, wait_s))), reason)


def _dearer(
    excess: float, ttft_share: float, alone_share: float, tpot_share: float, settings: GateSettings
) -> tuple[float, float]:
    """Shares of the targets as they are counted for a tenant above its share.

    Its long prompts are refused first, the short ones with the queue: so it keeps most of its requests for the work
    that it gives up. The own part weighs more, as it is what the others wait for.
    """
    over = max(0.0, excess - settings.fair_slack)
    waits = ttft_share - alone_share
    ttft_share = waits * (1 + settings.wait_gain * over) + alone_share * (1 + settings.own_gain * over)
    return ttft_share, tpot_share * (1 + settings.tpot_gain * over * over)


def lowering_pays(
    outlook: Outlook,
    asked: LengthForecast,
    lowered: LengthForecast,
    *,
    same_conversation: bool,
) -> bool:
    """Whether a lower effort saves more than it costs.

    The effort's line heads the prompt: another effort hits nothing of what is cached, so ``hit_tokens`` are computed
    anew. A conversation keeps the effort it was granted.
    """
    if same_conversation:
        return False
    cost_s = outlook.hit_tokens / outlook.prefill_tokens_per_s
    saved_s = (asked.mean - lowered.mean) * outlook.tpot_s
    return saved_s > cost_s
