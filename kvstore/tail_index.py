"""Tails by where they continue: which of them fits a prompt. Not thread-safe; owned by ``SwaPool``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.tails import TailId, TailPlace, rest_digest


class TailIndex:
    """Identities by parent block. Several tails may share one parent: answers that differ in their last tokens."""

    def __init__(self) -> None:
        self._by_parent: dict[bytes, dict[TailId, TailPlace]] = {}

    def add(self, identity: TailId, place: TailPlace) -> None:
        """A tail is held."""
        self._by_parent.setdefault(place.parent, {})[identity] = place

    def discard(self, identity: TailId, place: TailPlace) -> None:
        """It is not any more; unknown ones are passed over."""
        places = self._by_parent.get(place.parent, {})
        places.pop(identity, None)
        if not places:
            self._by_parent.pop(place.parent, None)

    def fitting(self, parent: bytes, after: npt.NDArray[np.integer]) -> Iterator[tuple[TailId, TailPlace]]:
        """Tails that continue a prompt with ``after`` behind ``parent``, the longest first."""
        yield from fitting(self._by_parent.get(parent, {}).items(), after)

    def __len__(self) -> int:
        return sum(len(places) for places in self._by_parent.values())


def fitting(
    places: Iterable[tuple[TailId, TailPlace]], after: npt.NDArray[np.integer]
) -> Iterator[tuple[TailId, TailPlace]]:
    """Of tails of one parent those whose tokens ``after`` begins with, the longest first."""
    digests: dict[int, bytes] = {}
    for identity, place in sorted(places, key=lambda item: -item[1].after_tokens):
        tokens = place.after_tokens
        if tokens <= len(after):
            if tokens not in digests:
                digests[tokens] = rest_digest(after[:tokens])
            if digests[tokens] == place.rest:
                yield identity, place
