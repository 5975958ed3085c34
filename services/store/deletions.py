"""What was deleted lately: it must not come back from a neighbour that has not deleted it yet."""

from __future__ import annotations

from typing import Final

from epdserve.kvstore.clock import Clock
from epdserve.services.store_types import HASH_BYTES, CacheOwner

REMEMBERED_S: Final = 600.0
_MOST: Final = 1024


class Deletions:
    """Tenants and roots that were deleted in the last minutes. Owned by one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends: dict[tuple[str, bytes], float] = {}

    def note_tenant(self, tenant: bytes) -> None:
        """A tenant's bytes are being deleted."""
        self._note("tenant", tenant)

    def note_root(self, root: bytes) -> None:
        """A model's bytes are being deleted."""
        self._note("root", root[:HASH_BYTES])

    def recent(self, owner: CacheOwner) -> bool:
        """Whether an owner's bytes were deleted lately: what neighbours still hold of it is not wanted."""
        return self.since(owner, self._clock.monotonic() - REMEMBERED_S)

    def since(self, owner: CacheOwner, moment: float) -> bool:
        """Whether an owner's bytes were deleted at a moment or later: what was begun before it is not to be kept."""
        keys = (("tenant", owner.tenant), ("root", owner.root[:HASH_BYTES]))
        return any(self._ends.get(key, float("-inf")) - REMEMBERED_S >= moment for key in keys)

    def _note(self, kind: str, name: bytes) -> None:
        now = self._clock.monotonic()
        self._ends = {key: end for key, end in self._ends.items() if end > now}
        if len(self._ends) >= _MOST:
            self._ends.pop(next(iter(self._ends)))
        self._ends[kind, name] = now + REMEMBERED_S
