"""What a request says about thinking, resolved to one value that prompt and parser share.

Names and numbers of spec 5.3: none turns thinking off; minimal and low are 50; medium, high (the default) and
xhigh are 75; max and ultra are 100; integers are taken as they are. ``thinking.type: disabled`` wins over any
effort, and an explicit ``enabled`` or ``adaptive`` wins over ``none``, as in the official converter.
"""

from __future__ import annotations

from typing import Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.types import Effort

DEFAULT_EFFORT: Final = Effort(75)

_LEVELS: Final[dict[str, int]] = {
    "minimal": 50,
    "low": 50,
    "medium": 75,
    "high": 75,
    "xhigh": 75,
    "max": 100,
    "ultra": 100,
}
_SWITCHES: Final = ("enabled", "disabled", "adaptive")

# What the two fields take, for errors
EFFORTS_TAKEN: Final = f"an integer from 1 to 100 or one of {', '.join(('none', *_LEVELS))}"
SWITCHES_TAKEN: Final = f"one of {', '.join(_SWITCHES)}"


def resolve_effort(
    *,
    thinking: str | None,
    effort: str | int | None,
    default_thinking: bool = True,
    default_effort: int = DEFAULT_EFFORT.level,
) -> Effort | None:
    """Effort of a request, or None if it does not think.

    Args:
        thinking: ``thinking.type`` of the request, None if absent.
        effort: ``reasoning_effort`` of the request, None if absent.
        default_thinking: What a request that says nothing gets; ``default_effort`` if it thinks.

    Raises:
        InvalidRequest: An unknown name, or a number outside 1..100.
    """
    if thinking is not None and thinking not in _SWITCHES:
        raise InvalidRequest(f"thinking.type must be {SWITCHES_TAKEN}", param="thinking")
    level = Effort(default_effort) if effort is None or effort == "none" else _level(effort)
    if thinking == "disabled" or (effort == "none" and thinking is None):
        return None
    if thinking is None and effort is None and not default_thinking:
        return None
    return level


def _level(effort: str | int) -> Effort:
    if isinstance(effort, str):
        if effort not in _LEVELS:
            raise InvalidRequest(f"reasoning_effort must be {EFFORTS_TAKEN}", param="reasoning_effort")
        return Effort(_LEVELS[effort])
    if not 1 <= effort <= 100:
        raise InvalidRequest(f"reasoning_effort must lie in 1..100, got {effort}", param="reasoning_effort")
    return Effort(effort)
