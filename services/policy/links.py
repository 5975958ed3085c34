"""How fast hand-offs between prefill and decode workers are, as decode workers report them.

Pairs of one machine and pairs of two are told apart: memory is shared or a network is crossed, and between hundreds
of workers no pair sees enough hand-offs to be known by itself. Of each kind a straight line is kept, seconds over
bytes, by least squares that forget; it begins as the default says, as if two hand-offs had been seen to agree with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from epdserve.services.policy.pools import Links

_KEPT: Final = 0.98  # of older news with each new hand-off
_DEFAULT_WEIGHT: Final = 1.0  # of each of the two at first; it fades as all does
_FAR_BYTES: Final = 100e6  # where the second of the two is
_LONGEST_LATENCY_S: Final = 10.0
_SPEEDS: Final = (1e3, 1e13)
_USUAL: Final = Links()


class LinkModel:
    """Learns from hand-offs. Bounded, has no clock; owned by one thread.

    Args:
        default: What is believed until some have been seen; ``fixed_bytes`` stays.
    """

    def __init__(self, default: Links = _USUAL) -> None:
        self._default = default
        self._links = default
        self._lines = {
            True: _Line(default.latency_s, default.same_machine_bytes_per_s),
            False: _Line(default.other_latency_s, default.other_machine_bytes_per_s),
        }
        self.handoffs = 0

    @property
    def links(self) -> Links:
        """As measured."""
        return self._links

    def observe(self, *, same_machine: bool, nbytes: float, seconds: float) -> None:
        """Learn from one.

        Args:
            nbytes: Of blocks; ``fixed_bytes`` come on top.
            seconds: From its beginning until the request could decode.
        """
        if nbytes <= 0 or not 0 < seconds < float("inf"):
            return
        self.handoffs += 1
        line = self._lines[same_machine]
        line.add(nbytes + self._default.fixed_bytes, seconds)
        if same_machine:
            self._links = replace(
                self._links, latency_s=line.latency_s, same_machine_bytes_per_s=line.bytes_per_s
            )
        else:
            self._links = replace(
                self._links, other_latency_s=line.latency_s, other_machine_bytes_per_s=line.bytes_per_s
            )


class _Line:
    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self._sums = [0.0] * 5  # of ones, bytes, seconds, bytes squared, bytes times seconds
        for nbytes in (0.0, _FAR_BYTES):
            self._count(nbytes, latency_s + nbytes / bytes_per_s, _DEFAULT_WEIGHT)

    def add(self, nbytes: float, seconds: float) -> None:
        self._sums = [_KEPT * value for value in self._sums]
        self._count(nbytes, seconds, 1.0)
        ones, x, y, xx, xy = self._sums
        spread = ones * xx - x * x
        slope = (ones * xy - x * y) / spread if spread > 1e-9 * ones * xx else -1.0
        latency_s = (y - slope * x) / ones
        if slope <= 0:  # larger ones were no slower: all of it is latency
            slope, latency_s = 1 / _SPEEDS[1], y / ones
        elif latency_s < 0:
            slope, latency_s = xy / xx, 0.0
        self.latency_s = min(_LONGEST_LATENCY_S, latency_s)
        self.bytes_per_s = min(_SPEEDS[1], max(_SPEEDS[0], 1 / slope))

    def _count(self, nbytes: float, seconds: float, weight: float) -> None:
        more = (1.0, nbytes, seconds, nbytes * nbytes, nbytes * seconds)
        self._sums = [value + weight * one for value, one in zip(self._sums, more, strict=True)]
