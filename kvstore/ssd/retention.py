"""Who may come in and who goes: pure decisions over a snapshot.

The promise: a block stays for ``floor_s`` after its last use. In ``floor`` mode nothing younger goes, and who comes
when nothing older is left is refused; ``best_effort`` lets the younger go and counts. A small reserve stands outside
the promise, for blocks of running requests. Leaves go first: a block is of no use without the ones before it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
Flags = NDArray[np.bool_]

DAY_S: Final = 24 * 3600
NO_PARENT: Final = 0


class Mode(enum.Enum):
    """What happens when the disk is full of blocks younger than the floor."""

    FLOOR = "floor"
    BEST_EFFORT = "best_effort"


class Admission(enum.Enum):
    """What became of a block that wanted in."""

    ACCEPTED = "accepted"
    HELD = "held"  # already stored or on its way; its last use is now
    QUEUE_FULL = "queue_full"  # write-behind memory is used up: the disk is slower than the arrivals
    NO_SPACE = "no_space"  # a sweep has not yet made room
    FLOOR = "floor"  # everything stored is younger than the floor
    QUOTA = "quota"  # the tenant holds all it may
    BUDGET = "budget"  # the day's bytes are written
    FIRST_SEEN = "first_seen"  # second-hit admission: remembered for next time
    NO_DIRECTORY = "no_directory"  # every drive failed


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The rules. Ratios are of all slots."""

    floor_s: int = 3 * DAY_S
    mode: Mode = Mode.FLOOR
    reserve_ratio: float = 0.01
    low_free_ratio: float = 0.02  # a sweep starts when less is free, the reserve aside
    high_free_ratio: float = 0.04  # and ends when so much is
    default_quota_bytes: int | None = None
    quota_bytes: Mapping[bytes, int] = field(default_factory=dict)  # by tenant
    last_use_step_s: int = 600  # how coarsely last use is kept on disk
    max_downtime_s: int = 3600  # the longest a restart may age blocks, whatever the wall clock says

    def __post_init__(self) -> None:
        ratios = (self.reserve_ratio, self.low_free_ratio, self.high_free_ratio)
        if not all(0 <= ratio < 0.5 for ratio in ratios) or self.low_free_ratio > self.high_free_ratio:
            raise ValueError(f"impossible ratios (reserve, low, high): {ratios}")
        if min(self.floor_s, self.max_downtime_s) < 0 or self.last_use_step_s <= 0:
            raise ValueError(f"negative time in {self!r}")

    def quota_of(self, tenant: bytes) -> int | None:
        """Bytes a tenant may hold; None is no limit."""
        return self.quota_bytes.get(tenant, self.default_quota_bytes)

    def reserve_slots(self, total: int) -> int:
        """Slots outside the floor."""
        return int(total * self.reserve_ratio)


class Space(NamedTuple):
    """Slots of the directories that serve."""

    total: int
    free: int
    reserve_used: int  # slots whose block came in over the reserve

    def general_free(self, policy: RetentionPolicy) -> int:
        """Free slots that anybody may have."""
        return self.free - max(0, policy.reserve_slots(self.total) - self.reserve_used)

    def to_free(self, policy: RetentionPolicy) -> int:
        """Slots a sweep should free: none above the low watermark, up to the high one below it."""
        free = self.general_free(policy)
        if self.total == 0 or free >= max(1, self.total * policy.low_free_ratio):
            return 0
        return max(1, int(np.ceil(self.total * policy.high_free_ratio))) - free


def admit(
    space: Space,
    policy: RetentionPolicy,
    *,
    tenant: bytes,
    tenant_bytes: int,
    slot_bytes: int,
    running: bool,
    nothing_may_go: bool,
) -> tuple[Admission, bool]:
    """May a block come in? Returns the answer and whether it takes from the reserve.

    ``nothing_may_go``: the last sweep found every block younger than the floor.
    """
    quota = policy.quota_of(tenant)
    over = quota is not None and tenant_bytes + slot_bytes > quota
    if not over and space.general_free(policy) > 0:
        return Admission.ACCEPTED, False
    if running and space.free > 0 and space.reserve_used < policy.reserve_slots(space.total):
        return Admission.ACCEPTED, True
    if over:
        return Admission.QUOTA, False
    return (Admission.FLOOR if nothing_may_go else Admission.NO_SPACE), False


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Columns over the stored blocks. ``key`` and ``parent`` are the first 8 bytes of their hashes.

    Two hashes that agree there (one in 10^5 stores of 10^7 blocks has such a pair) cost a wrong order, nothing else.
    """

    key: Keys
    parent: Keys
    last_use: Ints
    tenant: Ints  # index of the tenant
    reserve: Flags
    sequence: Keys  # order of arrival: decides between blocks that were used in the same second


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """What goes, first to last: indices into ``HeldBlocks``."""

    order: Ints
    violations: int  # of them, younger than the floor
    next_due_s: int | None  # when the next block is old enough; None: at once, or never


def plan_eviction(
    held: HeldBlocks,
    policy: RetentionPolicy,
    *,
    now_s: int,
    slots_wanted: int,
    reserve_wanted: int = 0,
    over_quota: Mapping[int, int] | None = None,
) -> EvictionPlan:
    """Choose what goes: of tenants over their quota, then the least recently used, leaves first.

    Args:
        held: Every stored block. policy: The rules. now_s: Tier time. slots_wanted: To be freed.
        reserve_wanted: Of them, so many may be younger blocks of the reserve if the floor leaves no other.
        over_quota: Slots that a tenant (by index) has to give up.
    """
    use, latest, depth = _use_and_depth(held)
    order = np.lexsort((held.sequence, -depth, latest, use)).astype(np.int64)
    old = now_s - use >= policy.floor_s
    may_go = old if policy.mode is Mode.FLOOR else np.ones_like(old)
    chosen = np.zeros(len(order), np.bool_)
    for tenant, slots in sorted((over_quota or {}).items()):
        own = order[(held.tenant[order] == tenant) & may_go[order]]
        chosen[own[: max(0, slots)]] = True
    rest = order[may_go[order] & ~chosen[order]]
    chosen[rest[: max(0, slots_wanted - int(chosen.sum()))]] = True
    missing = min(reserve_wanted, slots_wanted - int(chosen.sum()))
    if missing > 0:
        apart = _only_reserve_below(held)
        chosen[order[apart[order] & ~chosen[order]][:missing]] = True
    picked = order[chosen[order]]
    young = order[~old[order] & ~chosen[order]]
    due = int(use[young[0]]) + policy.floor_s if len(young) and policy.mode is Mode.FLOOR else None
    return EvictionPlan(picked, int((~old[picked] & ~held.reserve[picked]).sum()), due)


def _parents(held: HeldBlocks) -> Ints:
    """Index of each block's parent, or -1 where it is not stored."""
    if not len(held.key):
        return np.zeros(0, np.int64)
    by_key = np.argsort(held.key, kind="stable")
    sorted_keys = held.key[by_key]
    at = np.minimum(np.searchsorted(sorted_keys, held.parent), len(by_key) - 1)
    index = by_key[at].astype(np.int64)
    found = (sorted_keys[at] == held.parent) & (held.parent != NO_PARENT) & (index != np.arange(len(index)))
    return np.where(found, index, -1)


def _use_and_depth(held: HeldBlocks) -> tuple[Ints, Keys, Ints]:
    """Last use of a block or of anything below it, the latest of them to arrive, and depth.

    Sorted so, no parent goes before its child; and of chains that were used in the same second one goes after the
    other, not the ends of all: half a chain is worth less than half of the chains, and its holes are small.
    Ancestors at distance 1, 2, 4, ...: a chain of a million tokens takes 13 rounds.
    """
    use, latest, up = held.last_use.copy(), held.sequence.copy(), _parents(held)
    depth = (up >= 0).astype(np.int64)
    rounds = 0
    while (has := up >= 0).any() and rounds < 40:  # a bound, should two keys ever make a circle
        np.maximum.at(use, up[has], use[has].copy())
        np.maximum.at(latest, up[has], latest[has].copy())
        depth[has] += depth[up[has]]
        up = np.where(has, up[up], -1)
        rounds += 1
    return use, latest, depth


def _only_reserve_below(held: HeldBlocks) -> Flags:
    """Blocks of the reserve with no other kind of block below them."""
    other, up, rounds = ~held.reserve, _parents(held), 0
    while (has := up >= 0).any() and rounds < 40:
        np.logical_or.at(other, up[has], other[has].copy())
        up = np.where(has, up[up], -1)
        rounds += 1
    return ~other
