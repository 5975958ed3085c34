"""What the gauges of a tier show, read at scrape time so that they cannot drift."""

from __future__ import annotations

from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import SlotState


class Figures:
    """Thread-safe; does no I/O."""

    def __init__(self, core: TierCore) -> None:
        self._core = core

    def slots(self, state: str) -> int:
        """Slots of serving directories in a state."""
        with self._core.lock:
            return sum(d.by_state()[SlotState[state.upper()]] for d in self._core.inventory.serving())

    def directories(self, state: str) -> int:
        """Directories that are ``serving`` or ``failed``."""
        serving = len(self._core.inventory.serving())
        return serving if state == "serving" else len(self._core.inventory.directories) - serving

    def slots_missing(self) -> int:
        """Slots in no state; anything but 0 is a bug."""
        with self._core.lock:
            return sum(d.count - sum(d.by_state().values()) for d in self._core.inventory.serving())

    def allocated_bytes(self) -> int:
        """Bytes set aside on disk."""
        return sum(d.slots.accounted_bytes() for d in self._core.inventory.serving())

    def live_bytes(self) -> int:
        """Bytes of stored records."""
        return len(self._core.inventory) * self._core.layout.slot_bytes

    def reserve_used_slots(self) -> int:
        """Slots whose block came in over the reserve."""
        return self._core.inventory.reserve_used

    def queue_blocks(self) -> int:
        """Blocks accepted and not stored."""
        return len(self._core.queue)

    def queue_oldest_seconds(self) -> float:
        """How long the oldest of them waits."""
        with self._core.lock:
            return self._core.queue.oldest_s(self._core.clock.monotonic())

    def achieved_age_seconds(self) -> float:
        """How long blocks are really kept: idle time of what went last for space, or of the oldest so far."""
        core = self._core
        with core.lock:
            if core.achieved_age_s is not None:
                return core.achieved_age_s
            return core.inventory.oldest_idle_s(core.time.now())
