"""How much a worker is to be avoided: from what was seen of it, long before a deadline passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_STEP_GRACE: Final = 4.0
_AVOID_S: Final = 1e6


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a worker lately.

    Attributes:
        draining: It takes no new work.
        heartbeat_age_s: Since it was last heard of.
        step_age_s: How long its present step has been running.
        usual_step_s: How long its steps take.
        failures: Calls that failed, fading; ``calls`` are all.
    """

    draining: bool = False
    heartbeat_age_s: float = 0.0
    step_age_s: float = 0.0
    usual_step_s: float = 1.0
    failures: float = 0.0
    calls: float = 0.0


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Of health.

    Attributes:
        heartbeat_s: Heartbeats come this often; what is older makes suspicious.
        retry_s: What a failed call costs its request.
        prior_calls: Calls that went well which everybody is given at first.
    """

    heartbeat_s: float = 0.5
    retry_s: float = 2.0
    prior_calls: float = 20.0


def trouble_s(seen: Seen, settings: HealthSettings = HealthSettings()) -> float:
    """Seconds of delay to expect beyond the queue, 0 for a healthy worker; a draining one is as good as not there.

    A step that runs far longer than usual is expected to go on for as long as it has (the life of what has no memory
    of its age would be shorter, but hangs are long); so is silence. Failures cost their retry with the odds seen.
    """
    if seen.draining:
        return _AVOID_S
    hanging_s = max(0.0, seen.step_age_s - _STEP_GRACE * seen.usual_step_s)
    silent_s = max(0.0, seen.heartbeat_age_s - 3 * settings.heartbeat_s)
    odds = seen.failures / (seen.calls + settings.prior_calls)
    odds = min(odds, 0.99)
    return hanging_s + silent_s + settings.retry_s * odds / (1 - odds)


def faded(value: float, *, elapsed_s: float, half_life_s: float = 10.0) -> float:
    """A count after some time."""
    return float(value * 0.5 ** (max(0.0, elapsed_s) / half_life_s))
