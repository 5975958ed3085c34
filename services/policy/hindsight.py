"""How far off expectations have been lately: what requests saw over what had been expected of them.

Speeds are measured one request at a time, and steps are shared by more requests than the arithmetic of a placement
knows of; whatever it is that makes expectations wrong on some machine, it makes the next ones wrong alike. So the gate
multiplies them by what they were off by. Placement does not: a factor common to all pairs changes no order.

Only expectations that are too bright by a good part are corrected. What came sooner than expected had been let in for
being expected early: to let in more on the strength of that fills workers to the brim, and simulations lost a twelfth
of the goodput by it. A little later than expected is what whoever came afterwards did: where decode workers are nearly
full, to refuse the next one for it lost as much.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_NEWEST: Final = 0.1
_REFUSED: Final = 0.97
_LEAST, _MOST = math.log(0.25), math.log(16.0)
# Below this share of a target an expectation was no reason to refuse anybody, and how wrong it was says nothing
_CALM: Final = 0.1
_OPEN: Final = 8192
# Up to the first nothing is corrected, from the second on everything
_FROM, _WHOLLY = 1.2, 1.5


@dataclass(slots=True)
class _Expected:
    ttft_s: float
    tpot_s: float
    ttft_target_s: float
    tpot_target_s: float


class Hindsight:
    """Owned by the event loop; bounded by the latest 8,192 requests whose end has not been seen."""

    def __init__(self) -> None:
        self._logs = {"ttft": 0.0, "tpot": 0.0}
        self._open: OrderedDict[str, _Expected] = OrderedDict()

    @property
    def ttft(self) -> float:
        """What to multiply expectations of the first token by: seen over expected, 1 where that is little."""
        return _corrected(math.exp(self._logs["ttft"]))

    @property
    def tpot(self) -> float:
        """The same of each further token."""
        return _corrected(math.exp(self._logs["tpot"]))

    def expect(
        self, request_id: str, *, ttft_s: float, tpot_s: float, ttft_target_s: float, tpot_target_s: float
    ) -> None:
        """A request was let in with these expectations, not multiplied by anything."""
        self._open[request_id] = _Expected(ttft_s, tpot_s, ttft_target_s, tpot_target_s)
        if len(self._open) > _OPEN:
            self._open.popitem(last=False)

    def began(self, request_id: str, ttft_s: float) -> None:
        """Its first token has come."""
        if (known := self._open.get(request_id)) is not None:
            self._note("ttft", ttft_s, known.ttft_s, known.ttft_target_s)

    def ended(self, request_id: str, tpot_s: float | None) -> None:
        """Its last one has; None if there were not two."""
        known = self._open.pop(request_id, None)
        if known is not None and tpot_s is not None:
            self._note("tpot", tpot_s, known.tpot_s, known.tpot_target_s)

    def refused(self) -> None:
        """A request was refused by expectations that were corrected.

        If hardly anybody is let in, nobody tells that the correction is out of date: so each refusal fades it.
        """
        for what, log in self._logs.items():
            if _corrected(math.exp(log)) > 1:
                self._logs[what] = _REFUSED * log

    def _note(self, what: str, seen_s: float, expected_s: float, target_s: float) -> None:
        least_s = _CALM * target_s
        ratio = math.log(max(seen_s, least_s) / max(expected_s, least_s))
        old = self._logs[what]
        self._logs[what] = min(_MOST, max(_LEAST, old + _NEWEST * (ratio - old)))


def _corrected(ratio: float) -> float:
    if ratio >= _WHOLLY:
        return ratio
    return 1.0 + max(0.0, ratio - _FROM) * (_WHOLLY - 1) / (_WHOLLY - _FROM)
