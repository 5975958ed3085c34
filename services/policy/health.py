"""How much a worker is to be avoided: from what was seen of it, long before a deadline passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from epdserve.services.policy.pools import Floats

_STEP_GRACE: Final = 4.0
_AVOID_S: Final = 1e6

Reals: TypeAlias = float | Floats
"""Of one worker, or of several."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What was seen of a worker lately, or of several: arrays of one shape then, or one number for all of them.

    Attributes:
        draining: It takes no new work.
        heartbeat_age_s: Since it was last heard of.
        step_age_s: How long its present step has been running.
        usual_step_s: How long its steps take.
        failures: Calls that failed, fading; ``calls`` are all.
    """

    draining: bool | npt.NDArray[np.bool_] = False
    heartbeat_age_s: Reals = 0.0
    step_age_s: Reals = 0.0
    usual_step_s: Reals = 1.0
    failures: Reals = 0.0
    calls: Reals = 0.0


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


def trouble_s(seen: Seen, settings: HealthSettings = HealthSettings()) -> Floats:
    """Seconds of delay to expect beyond the queue, 0 for a healthy worker; a draining one is as good as not there.

    A step that runs far longer than usual is expected to go on for as long as it has (the life of what has no memory
    of its age would be shorter, but hangs are long); so is silence. Failures cost their retry with the odds seen.

    Returns:
        An array of the shape of what was seen.
    """
    hanging_s = np.maximum(0.0, seen.step_age_s - _STEP_GRACE * np.asarray(seen.usual_step_s))
    silent_s = np.maximum(0.0, np.asarray(seen.heartbeat_age_s) - 3 * settings.heartbeat_s)
    odds = np.minimum(0.99, seen.failures / (np.asarray(seen.calls) + settings.prior_calls))
    delay_s = hanging_s + silent_s + settings.retry_s * odds / (1 - odds)
    return np.asarray(np.where(seen.draining, _AVOID_S, delay_s), dtype=np.float64)


def faded(value: float, *, elapsed_s: float, half_life_s: float = 10.0) -> float:
    """A count after some time."""
    return float(value * 0.5 ** (max(0.0, elapsed_s) / half_life_s))


def fading(elapsed_s: Reals, *, half_life_s: float = 10.0) -> Floats:
    """What is left of a count after some time, as a share of it."""
    kept: Floats = np.asarray(0.5 ** (np.maximum(0.0, elapsed_s) / half_life_s), dtype=np.float64)
    return kept
