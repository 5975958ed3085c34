"""Fixed places that one owner holds at a time: state slots, staging slots for tails. Thread-safe."""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

from epdserve.kvstore.errors import ConservationError, SlotNotHeld


class _State(enum.Enum):
    FREE = "free"
    HELD = "held"
    QUARANTINED = "quarantined"


class Slot(NamedTuple):  # a tuple, as hundreds are taken at a time
    """A place and the number of its owners so far; proves who may give it back."""

    index: int  # type: ignore[assignment]  # nobody misses the tuple's method of that name
    generation: int


@dataclass(frozen=True, slots=True)
class SlotCounts:
    """Slots by state. ``free + held + quarantined == total`` always."""

    free: int
    held: int
    quarantined: int
    total: int


class SlotPool:
    """Hands out slots, the one freed longest ago first."""

    def __init__(self, count: int) -> None:
        if count <= 0:
            raise ValueError(f"count must be positive, got {count}")
        self._lock = threading.Lock()
        self._free = deque(range(count))
        self._states = [_State.FREE] * count
        self._generations = [0] * count

    def acquire(self) -> Slot | None:
        """A slot of one's own, or None when all are taken."""
        slots = self.acquire_some(1)
        return slots[0] if slots else None

    def acquire_some(self, count: int) -> list[Slot]:
        """Slots of one's own, fewer than ``count`` when all are taken."""
        slots = []
        with self._lock:
            free, states, generations, held = self._free, self._states, self._generations, _State.HELD
            for _ in range(min(count, len(free))):
                index = free.popleft()
                states[index] = held
                generations[index] = generation = generations[index] + 1
                slots.append(Slot(index, generation))
        return slots

    def release(self, slot: Slot) -> None:
        """Give a slot back.

        Raises:
            SlotNotHeld: It is not held, or by a later owner.
        """
        self._move(slot, _State.HELD, _State.FREE)

    def quarantine(self, slot: Slot) -> None:
        """Set apart the destination of a transfer of unknown state: a late write may still land.

        Raises:
            SlotNotHeld: It is not held, or by a later owner.
        """
        self._move(slot, _State.HELD, _State.QUARANTINED)

    def transfer_over(self, slot: Slot) -> None:
        """Free a quarantined slot: the transfer is known to be over, or its agent closed.

        Raises:
            SlotNotHeld: It is not quarantined, or belongs to a later owner.
        """
        self._move(slot, _State.QUARANTINED, _State.FREE)

    def counts(self) -> SlotCounts:
        """Slots by state."""
        with self._lock:
            by_state = Counter(self._states)
        return SlotCounts(
            by_state[_State.FREE], by_state[_State.HELD], by_state[_State.QUARANTINED], len(self._states)
        )

    def check(self) -> None:
        """Recount.

        Raises:
            ConservationError: Free list and states differ.
        """
        with self._lock:
            free = {index for index, state in enumerate(self._states) if state is _State.FREE}
            if len(self._free) != len(free) or set(self._free) != free:
                raise ConservationError([f"free list {sorted(self._free)}, free slots {sorted(free)}"])

    def _move(self, slot: Slot, before: _State, after: _State) -> None:
        with self._lock:
            known = 0 <= slot.index < len(self._states)
            state = self._states[slot.index].value if known else "unknown"
            if (
                not known
                or self._states[slot.index] is not before
                or self._generations[slot.index] != slot.generation
            ):
                raise SlotNotHeld(slot.index, slot.generation, state)
            self._states[slot.index] = after
            if after is _State.FREE:
                self._free.append(slot.index)
