"""What a request is promised: its class, targets of its own, its priority; by header or field, fields first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.policy.gate import GateSettings, SloClass
from epdserve.services.policy.settings import PolicySettings
from epdserve.services.schedule import HIGHEST_PRIORITY
from pydantic import BaseModel, ConfigDict, Field

CLASS_HEADER: Final = "x-slo-class"
TTFT_HEADER: Final = "x-ttft-target-s"
TPOT_HEADER: Final = "x-tpot-target-s"
PRIORITY_HEADER: Final = "x-priority"
_HEADERS: Final = (CLASS_HEADER, TTFT_HEADER, TPOT_HEADER, PRIORITY_HEADER)
LONGEST_TARGET_S: Final = 86_400.0

_USUAL: Final = "interactive"


class ClassSettings(BaseModel):
    """One class of requests.

    Attributes:
        room: Share of its targets' room that it may use up: the lower, the sooner it is shed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_target_s: float = Field(gt=0)
    tpot_target_s: float = Field(gt=0)
    room: float = Field(default=1.0, gt=0, le=1)


class SloSettings(BaseModel):
    """What requests are meant to see.

    Attributes:
        ttft_target_s, tpot_target_s: Of requests that name no class and no targets; placement weighs by them.
        refuse_late: Answer 429 to all that is expected to miss its targets, before anything is spent on it. What asked
            for a class or for targets is refused then in any case.
        margin: A target counts as missed from this multiple of it on.
        share_gain: How much dearer the queue is for a tenant, for each share that it has had beyond its own; 0 = shares
            do not count.
        classes: By name, besides ``interactive``, which has the targets above.
        weights: Of tenants' shares; 1 for those not named.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_target_s: float = Field(default=2.0, gt=0)
    tpot_target_s: float = Field(default=0.05, gt=0)
    refuse_late: bool = False
    margin: float = Field(default=1.0, gt=0)
    share_gain: float = Field(default=1.5, ge=0)
    classes: dict[str, ClassSettings] = Field(
        default={
            "standard": ClassSettings(ttft_target_s=6.0, tpot_target_s=0.08, room=0.85),
            "batch": ClassSettings(ttft_target_s=60.0, tpot_target_s=0.5, room=0.6),
        }
    )
    weights: dict[str, float] = Field(default={})

    @cached_property
    def usual(self) -> SloClass:
        """The class of requests that name none."""
        return SloClass(_USUAL, self.ttft_target_s, self.tpot_target_s)

    def named(self, name: str) -> SloClass | None:
        """A class, None if there is none of this name."""
        if name == _USUAL:
            return self.usual
        found = self.classes.get(name)
        return None if found is None else SloClass(name, found.ttft_target_s, found.tpot_target_s, found.room)


def policy_of(settings: SloSettings) -> PolicySettings:
    """All settings of the policies, as this router's configuration has them."""
    gate = GateSettings(settings.margin, settings.margin, wait_gain=settings.share_gain)
    if not settings.share_gain:
        gate = replace(gate, own_gain=0.0, tpot_gain=0.0)
    return PolicySettings(gate=gate)


@dataclass(frozen=True, slots=True)
class SloWish:
    """What a request says of it; None = nothing.

    Attributes:
        priority: As vLLM has it: lower goes first.
    """

    slo_class: str | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    priority: int | None = None

    def over(self, other: SloWish) -> SloWish:
        """This one, and what the other one says besides."""
        if other is NO_WISH:
            return self
        return SloWish(
            self.slo_class if self.slo_class is not None else other.slo_class,
            self.ttft_target_s if self.ttft_target_s is not None else other.ttft_target_s,
            self.tpot_target_s if self.tpot_target_s is not None else other.tpot_target_s,
            self.priority if self.priority is not None else other.priority,
        )

    @property
    def asks(self) -> bool:
        """Whether it says what it wants to see, so that it is refused rather than served too late."""
        return (self.slo_class, self.ttft_target_s, self.tpot_target_s) != (None, None, None)


NO_WISH: Final = SloWish()


def wish_of_headers(header: Callable[[str], str]) -> SloWish:
    """What headers say.

    Raises:
        InvalidRequest: A value that is no such number.
    """
    if not any(map(header, _HEADERS)):
        return NO_WISH
    priority = _number(header, PRIORITY_HEADER, -HIGHEST_PRIORITY, HIGHEST_PRIORITY)
    return SloWish(
        header(CLASS_HEADER) or None,
        _number(header, TTFT_HEADER, 1e-3, LONGEST_TARGET_S),
        _number(header, TPOT_HEADER, 1e-6, LONGEST_TARGET_S),
        None if priority is None else int(priority),
    )


def promised(wish: SloWish, settings: SloSettings) -> SloClass:
    """The class a request runs under, with its own targets in place of the class's.

    Raises:
        InvalidRequest: Nobody knows the class.
    """
    found = settings.usual if wish.slo_class is None else settings.named(wish.slo_class)
    if found is None:
        names = ", ".join((_USUAL, *settings.classes))
        raise InvalidRequest(f"slo_class must be one of {names}", param="slo_class")
    if not wish.ttft_target_s and not wish.tpot_target_s:
        return found
    return SloClass(
        found.name, wish.ttft_target_s or found.ttft_s, wish.tpot_target_s or found.tpot_s, found.room
    )


def _number(header: Callable[[str], str], name: str, low: float, high: float) -> float | None:
    said = header(name)
    if not said:
        return None
    try:
        value = float(said)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}", param=name)
    return value
