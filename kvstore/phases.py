"""The life of a page as one table. Drawn in the package's README."""

from __future__ import annotations

import enum
from typing import Final


class Phase(enum.IntEnum):  # IntEnum: hashed in C, and every step hashes one
    """Where a page is in its life."""

    FREE = 0
    FILLING = 1  # owned by one request, content undefined for everybody else
    SEALED = 2  # immutable, shared, referenced
    CACHED = 3  # immutable, nobody's
    QUARANTINED = 4  # a late write may still land


class Event(enum.IntEnum):
    """What can happen to a page."""

    RESERVE = 0
    SEAL = 1
    DUPLICATE = 2  # sealed, but the block was already here
    ABORT = 3
    QUARANTINE = 4
    TRANSFER_OVER = 5
    PIN = 6
    DESCRIBE = 7
    RELEASE = 8  # a reference that is not the last
    LAST_RELEASE = 9
    RETIRE = 10  # nobody references a page whose block has a better copy elsewhere
    HIT = 11
    EVICT = 12


NEXT: Final = {  # every other pair is a caller's bug
    (Phase.FREE, Event.RESERVE): Phase.FILLING,
    (Phase.FILLING, Event.SEAL): Phase.SEALED,  # immutable and shareable from here
    (Phase.FILLING, Event.DUPLICATE): Phase.FREE,
    (Phase.FILLING, Event.ABORT): Phase.FREE,
    (Phase.FILLING, Event.QUARANTINE): Phase.QUARANTINED,
    (Phase.QUARANTINED, Event.TRANSFER_OVER): Phase.FREE,
    (Phase.SEALED, Event.HIT): Phase.SEALED,
    (Phase.SEALED, Event.PIN): Phase.SEALED,
    (Phase.SEALED, Event.DESCRIBE): Phase.SEALED,
    (Phase.SEALED, Event.RELEASE): Phase.SEALED,
    (Phase.SEALED, Event.LAST_RELEASE): Phase.CACHED,
    (Phase.SEALED, Event.RETIRE): Phase.FREE,
    (Phase.CACHED, Event.HIT): Phase.SEALED,
    (Phase.CACHED, Event.RETIRE): Phase.FREE,
    (Phase.CACHED, Event.EVICT): Phase.FREE,  # no I/O: durable elsewhere already, or not worth keeping
}


_TABLE: Final = [
    [NEXT.get((phase, event)) for event in Event] for phase in Phase
]  # found without hashing a pair


def after(phase: Phase, event: Event) -> Phase | None:
    """Phase that follows; None if the event cannot happen to a page in ``phase``."""
    return _TABLE[phase][event]
