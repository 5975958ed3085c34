"""Which block lies where, whose it is and when it was used: everything the tier knows without I/O.

Not thread-safe: the tier's lock guards it, and no method waits for anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from epdserve.kvstore.block_events import EventBuffer
from epdserve.kvstore.ssd.directory import UNKNOWN_USE, Directory, SlotState, preferred
from epdserve.kvstore.ssd.record import EXACT, RESERVE, Name
from epdserve.kvstore.ssd.retention import HeldBlocks, Ints, RetentionPolicy, Space
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash

_SLOT_BITS: Final = 40
_HASH: Final = BLOCK_HASH_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of one of the directories, with the name it had when it was looked up."""

    directory: Directory
    slot: int
    name: Name


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The stored blocks as columns, for a decision that is made without the lock."""

    held: HeldBlocks
    directories: Ints  # number of each block's directory
    slots: Ints
    tenants: Sequence[bytes]


class Inventory:
    """Blocks of all directories that serve. A block costs 128 bytes for its name and some 150 to be found."""

    def __init__(self, directories: Sequence[Directory], event_capacity: int = 65536) -> None:
        self.directories = list(directories)
        self.events = EventBuffer(event_capacity)
        self.tenant_slots: Counter[bytes] = Counter()  # stored and on their way
        self.reserve_used = 0
        self.sequence = 0
        self._where: dict[BlockHash, int] = {}
        self._slot_bytes = directories[0].layout.slot_bytes

    def __len__(self) -> int:
        return len(self._where)

    def serving(self) -> list[Directory]:
        """Directories that have not failed."""
        return [directory for directory in self.directories if directory.failed is None]

    def load(self, now_s: int, step_s: int) -> None:
        """Take up what the directories hold after opening. Of two copies of a block the better one stays.

        Last use on disk may be ``step_s`` too early, so it counts as so much later; and never as later than now.
        """
        for directory in self.serving():
            live = directory.live()
            directory.last_use[live] = np.minimum(directory.last_use[live] + step_s, now_s)
            rows = directory.table.rows[live]
            hashes, tenants = rows["block_hash"].tobytes(), rows["tenant"].tobytes()
            if len(live):
                self.sequence = max(self.sequence, int(rows["sequence"].max()))
            base = self._code(directory, 0)
            for at, slot in enumerate(live.tolist()):
                span = slice(_HASH * at, _HASH * (at + 1))
                block_hash = BlockHash(hashes[span])
                if block_hash in self._where and not self._beats(directory, slot, block_hash):
                    directory.forget(slot, SlotState.LEAVING)
                    continue
                self._where[block_hash] = base + slot
                self.tenant_slots[tenants[span]] += 1
            kept = directory.table.rows["flags"][directory.live()]
            self.reserve_used += int(np.count_nonzero(kept & RESERVE))
        self.events.drain()  # readers begin with a snapshot

    def find(self, block_hash: BlockHash) -> Place | None:
        """Where a block lies."""
        code = self._where.get(block_hash)
        if code is None:
            return None
        directory = self.directories[code >> _SLOT_BITS]
        slot = code & ((1 << _SLOT_BITS) - 1)
        name = directory.table.name(slot)
        assert name is not None, f"slot {slot} of {directory.folder} lost its name"
        return Place(directory, slot, name)

    def in_disk_order(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Numbers of the blocks that are stored, neighbours on disk side by side."""
        found = [(code, at) for at, name in enumerate(hashes) if (code := self._where.get(name)) is not None]
        return [at for _, at in sorted(found)]

    def holds(self, block_hash: BlockHash, *, exact: bool = False) -> bool:
        """Whether a block is stored, as an exact one if asked so. Takes no name apart: chains are long."""
        code = self._where.get(block_hash)
        if code is None or not exact:
            return code is not None
        rows = self.directories[code >> _SLOT_BITS].table.rows
        return bool(rows["flags"][code & ((1 << _SLOT_BITS) - 1)] & EXACT)

    def holds_none(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether none of the blocks is stored."""
        return self._where.keys().isdisjoint(hashes)

    def hashes(self) -> tuple[BlockHash, ...]:
        """Every block stored."""
        return tuple(self._where)

    def still_there(self, place: Place) -> bool:
        """Whether the slot still has the name it had: nobody wrote it since, except its last use."""
        if self._where.get(place.name.block_hash) != self._code(place.directory, place.slot):
            return False
        return int(place.directory.table.rows["sequence"][place.slot]) == place.name.sequence

    def allocate(self, serving: Sequence[Directory]) -> tuple[Directory, int] | None:
        """A slot to write, in the directory with most room of those that serve."""
        directory = serving[0] if len(serving) == 1 else max(serving, key=lambda one: one.free, default=None)
        slot = directory.take() if directory is not None else None
        return None if directory is None or slot is None else (directory, slot)

    def next_sequences(self, count: int) -> int:
        """Number of the next put; those of the following ones come after it."""
        self.sequence += count
        return self.sequence - count + 1

    def add(
        self, directory: Directory, slots: list[int], hashes: Sequence[BlockHash], used_s: int
    ) -> list[Place]:
        """Written records are stored blocks from now on; returns those they replace, now leaving."""
        rivals = [rival for name in hashes if name in self._where and (rival := self.find(name)) is not None]
        for rival in rivals:
            self.remove(rival, SlotState.LEAVING)
        directory.stored(slots, used_s)
        base = self._code(directory, 0)
        self._where.update(zip(hashes, [base + slot for slot in slots], strict=True))
        self.events.note_held(hashes)
        return rivals

    def remove(self, place: Place, state: SlotState) -> None:
        """A block is gone from memory; its slot waits in ``state`` until the disk knows."""
        place.directory.forget(place.slot, state)
        del self._where[place.name.block_hash]
        self.events.note(place.name.block_hash, held=False)
        self.uncount(place.name.tenant, place.name.reserve)

    def count(self, tenant: bytes, reserve: bool) -> None:
        """A slot is this tenant's."""
        self.tenant_slots[tenant] += 1
        self.reserve_used += reserve

    def uncount(self, tenant: bytes, reserve: bool) -> None:
        """A slot is no longer this tenant's."""
        self.tenant_slots[tenant] -= 1
        if not self.tenant_slots[tenant]:
            del self.tenant_slots[tenant]
        self.reserve_used -= reserve

    def touch(self, block_hashes: Iterable[BlockHash], now_s: int) -> None:
        """These blocks were used now; unknown ones are passed over."""
        for block_hash in block_hashes:
            code = self._where.get(block_hash)
            if code is not None:
                self.directories[code >> _SLOT_BITS].last_use[code & ((1 << _SLOT_BITS) - 1)] = now_s

    def drop_directory(self, directory: Directory) -> int:
        """A drive failed: its blocks are misses from now on; returns how many there were."""
        lost = 0
        for slot in directory.live():
            name = directory.table.name(int(slot))
            if name is not None and self._where.get(name.block_hash) == self._code(directory, int(slot)):
                del self._where[name.block_hash]
                self.events.note(name.block_hash, held=False)
                self.uncount(name.tenant, name.reserve)
                lost += 1
        return lost

    def space(self) -> Space:
        """Slots of the directories that serve."""
        serving = self.serving()
        return Space(sum(d.count for d in serving), sum(d.free for d in serving), self.reserve_used)

    def latest_use(self) -> int:
        """The latest last use on disk; for setting the tier's time before ``load``."""
        used = [directory.last_use[directory.live()] for directory in self.serving()]
        known = [use[use < UNKNOWN_USE] for use in used]
        return max((int(use.max()) for use in known if len(use)), default=0)

    def oldest_idle_s(self, now_s: int) -> float:
        """Idle time of the stored block that was used longest ago."""
        used = [directory.last_use[directory.live()] for directory in self.serving()]
        return max((now_s - int(use.min()) for use in used if len(use)), default=0)

    def snapshot(self) -> Snapshot:
        """Copy the columns that decide who goes. At least one directory serves.

        The one method that may run without the tier's lock: whoever acts on it looks again at each block.
        """
        serving = self.serving()
        slots = [directory.live() for directory in serving]
        rows = np.concatenate([d.table.rows[live] for d, live in zip(serving, slots, strict=True)])
        numbers = [
            np.full(len(live), self.directories.index(d)) for d, live in zip(serving, slots, strict=True)
        ]
        tenant_keys = _first_eight(rows["tenant"])
        _, first, index = np.unique(tenant_keys, return_index=True, return_inverse=True)
        held = HeldBlocks(
            key=_first_eight(rows["block_hash"]),
            parent=_first_eight(rows["parent"]),
            last_use=np.concatenate([d.last_use[live] for d, live in zip(serving, slots, strict=True)]),
            tenant=index.reshape(-1).astype(np.int64),
            reserve=(rows["flags"] & RESERVE) != 0,
            sequence=rows["sequence"].copy(),
        )
        tenants = [rows["tenant"][at].tobytes() for at in first.tolist()]
        return Snapshot(held, np.concatenate(numbers), np.concatenate(slots), tenants)

    def over_quota(self, policy: RetentionPolicy) -> dict[bytes, int]:
        """Slots each tenant holds beyond its quota."""
        if policy.default_quota_bytes is None and not policy.quota_bytes:
            return {}
        excess = {}
        for tenant, slots in self.tenant_slots.items():
            quota = policy.quota_of(tenant)
            if quota is not None and (over := slots - quota // self._slot_bytes) > 0:
                excess[tenant] = over
        return excess

    def _beats(self, directory: Directory, slot: int, block_hash: BlockHash) -> bool:
        """Whether this copy takes the place of the one that was found first, in another directory."""
        name, rival = directory.table.name(slot), self.find(block_hash)
        assert name is not None, f"slot {slot} of {directory.folder} lost its name"
        assert rival is not None, f"{block_hash.hex()} is in the index and nowhere else"
        if not preferred(name, rival.name):
            return False
        self.remove(rival, SlotState.LEAVING)
        return True

    def problems(self, on_their_way: Counter[bytes]) -> list[str]:
        """What does not add up; ``on_their_way`` are accepted blocks by tenant."""
        found, tenants, live = [], Counter(on_their_way), 0
        for directory in self.serving():
            found += directory.problems()
            for slot in directory.live():
                name = directory.table.name(int(slot))
                live += 1
                if name is None or self._where.get(name.block_hash) != self._code(directory, int(slot)):
                    found.append(f"{directory.folder}: live slot {slot} is not in the index")
                else:
                    tenants[name.tenant] += 1
        if live != len(self._where):
            found.append(f"{len(self._where)} blocks in the index, {live} live slots")
        if tenants != self.tenant_slots:
            found.append(f"slots by tenant are {dict(tenants)}, counted as {dict(self.tenant_slots)}")
        return found

    def _code(self, directory: Directory, slot: int) -> int:
        return self.directories.index(directory) << _SLOT_BITS | slot


def _first_eight(
    hashes: np.ndarray[tuple[int], np.dtype[np.void]],
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.ascontiguousarray(hashes).view("<u8").reshape(-1, 2)[:, 0].copy()
