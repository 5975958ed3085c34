"""A measured figure beside its floor, and how both are timed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

BLOCK_BYTES: Final = 114_688  # a block of the released model: 128 tokens
PAYLOAD_BYTES: Final = 113_920


@dataclass(frozen=True, slots=True)
class Target:
    """What the figure, or its ratio to the floor, has to be."""

    number: float
    of: str = "ratio"  # or "value"
    at_most: bool = False

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.number:g}" + (" of the floor" if self.of == "ratio" else "")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``floor`` has the same unit as ``value``."""

    name: str
    value: float
    unit: str
    floor: float | None = None
    floor_name: str = ""
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        """The figure in floors."""
        return None if self.floor is None else self.value / self.floor

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without one."""
        if self.target is None:
            return None
        number = self.value if self.target.of == "value" else self.ratio
        assert number is not None, f"{self.name} has a target for a ratio and no floor"
        return number <= self.target.number if self.target.at_most else number >= self.target.number

    def cells(self) -> tuple[str, str, str, str, str]:
        """What, measured, floor, ratio, target."""
        floor = "" if self.floor is None else f"{_short(self.floor)} ({self.floor_name})"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        verdict = "" if self.target is None else f"{self.target}: {'met' if self.met else 'MISSED'}"
        return self.name, f"{_short(self.value)} {self.unit}", floor, ratio, verdict

    def as_json(self) -> dict[str, Any]:
        """The same, for machines."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "floor": self.floor,
            "floor_name": self.floor_name,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "met": self.met,
        }


Rows = Iterator[Row]


def times_s(*works: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each: the lower quartile, for a core that others use too makes single rounds slow and none fast.

    They take turns, so that a busy neighbour meets all of them alike. The first round warms up and is not counted.
    """
    seconds: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, taken in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work()
            if number:
                taken.append(time.perf_counter() - began)
    return [sorted(taken)[(len(taken) - 1) // 4] for taken in seconds]


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
