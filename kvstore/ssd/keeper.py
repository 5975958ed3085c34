"""Housekeeping of the tier: sweeps by watermarks, deletion, coarse last use. All of it writes, none of it decides."""

from __future__ import annotations

from typing import Final

import numpy as np
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.errors import DeletionIncomplete
from epdserve.kvstore.ssd.inventory import Place, Snapshot
from epdserve.kvstore.ssd.retention import EvictionPlan, plan_eviction

_BLOCKS_A_TURN: Final = 128
_ROWS_A_TURN: Final = 4096  # names whose last use is written at once; the rest comes next time


class Keeper:
    """Runs in the writer's thread, or in whoever calls."""

    def __init__(self, core: TierCore) -> None:
        self._core = core

    def sweep(self) -> int:
        """Free slots if fewer than the low watermark are free, or a tenant is over its quota; returns how many."""
        core = self._core
        with core.io_lock:
            with core.lock:
                space, now = core.inventory.space(), core.time.now()
                wanted, over = space.to_free(core.policy), core.inventory.over_quota(core.policy)
                half = -(-core.policy.reserve_slots(space.total) // 2)
                reserve_wanted = max(0, half - space.free)
                if not wanted:
                    core.nothing_may_go = False
                if not (wanted or over) or (now < core.quiet_until_s and not reserve_wanted):
                    return 0
            snapshot = core.inventory.snapshot()
            plan = plan_eviction(
                snapshot.held,
                core.policy,
                now_s=now,
                slots_wanted=wanted,
                reserve_wanted=reserve_wanted,
                over_quota={
                    snapshot.tenants.index(tenant): slots
                    for tenant, slots in over.items()
                    if tenant in snapshot.tenants
                },
            )
            if not len(plan.order) and plan.next_due_s is not None:
                core.quiet_until_s = plan.next_due_s  # no block can be old enough earlier
            return self._evict(snapshot, plan, now, wanted)

    def delete(self, field: str, value: bytes) -> int:
        """Delete every block of this ``tenant`` or ``root``, traces of evicted ones too; returns how many were stored.

        Names go first and leave a mark that a crash cannot lose, then bytes are overwritten, then the marks go. Blocks
        on their way are dropped. Reads the end of every free slot: about as long as recovery without names.

        Raises:
            DeletionIncomplete: A drive failed, now or earlier; the others are done.
        """
        core = self._core
        with core.io_lock:
            with core.lock:
                for pending in core.queue.by_hash.values():
                    if getattr(pending, field) == value:
                        pending.dropped = True
            deleted = sum(self._delete_in(directory, field, value) for directory in core.inventory.serving())
        if failed := tuple(one.folder for one in core.inventory.directories if one.failed is not None):
            raise DeletionIncomplete(deleted, failed)
        return deleted

    def save_use(self) -> int:
        """Write last uses that the disk has too old by the policy's step, and what time it is."""
        core, saved = self._core, 0
        with core.io_lock:
            for directory in core.inventory.serving():
                with core.lock:
                    due = directory.due(core.policy.last_use_step_s, _ROWS_A_TURN)
                    for slot in due:
                        name = directory.table.name(slot)
                        assert name is not None, f"live slot {slot} without a name"
                        use = int(directory.last_use[slot])
                        directory.table.set(slot, name._replace(last_use=use))
                if core.write_names(directory, due, sync=False):
                    saved += len(due)
                self.save_time(directory)
        return saved

    def save_time(self, directory: Directory) -> None:
        """Note the time in a directory's table."""
        try:
            directory.table.write_head(*self._core.time.stamp())
        except OSError as error:
            self._core.fail(directory, "names", error)

    def _evict(self, snapshot: Snapshot, plan: EvictionPlan, now: int, wanted: int) -> int:
        core = self._core
        idle: list[int] = []
        touched: set[int] = set()
        for start in range(0, len(plan.order), _BLOCKS_A_TURN):
            with core.lock:  # in turns: callers of try_put wait for it
                for index in plan.order[start : start + _BLOCKS_A_TURN].tolist():
                    used = self._let_go(snapshot, index)
                    if used is not None:
                        idle.append(now - used)
                        touched.add(int(snapshot.directories[index]))
        with core.lock:
            core.nothing_may_go = wanted > 0 and not idle
            if idle:
                core.achieved_age_s = idle[-1]
        for index in touched:
            core.settle(core.inventory.directories[index])
        core.metrics.evicted("space" if wanted else "quota", idle, plan.violations)
        return len(idle)

    def _let_go(self, snapshot: Snapshot, index: int) -> int | None:
        """Remove a block as planned and say when it was used last; not if it is gone or was used since."""
        core = self._core
        directory = core.inventory.directories[int(snapshot.directories[index])]
        slot = int(snapshot.slots[index])
        name, used = directory.table.name(slot), int(directory.last_use[slot])
        if name is None or name.sequence != int(snapshot.held.sequence[index]):
            return None
        place = Place(directory, slot, name)
        if used > int(snapshot.held.last_use[index]) or not core.inventory.still_there(place):
            return None
        core.inventory.remove(place, SlotState.LEAVING)
        return used

    def _delete_in(self, directory: Directory, field: str, value: bytes) -> int:
        core = self._core
        core.settle(directory)
        if directory.failed is not None:
            return 0
        with core.lock:
            others = np.flatnonzero(directory.states != SlotState.LIVE).tolist()
        traces = directory.slots.names(others)
        unreadable = [slot for slot in others if slot not in traces]  # whose they are cannot be known
        marked: list[int] = []
        with core.lock:
            for slot in (stored := directory.belonging(field, value)):
                name = directory.table.name(slot)
                assert name is not None, f"live slot {slot} without a name"
                core.inventory.remove(Place(directory, slot, name), SlotState.LEAVING)
                directory.table.set(slot, name._replace(deleted=True))
                marked.append(slot)
            for slot, trace in traces.items():
                if trace is not None and getattr(trace, field) == value:
                    directory.table.set(slot, trace._replace(deleted=True))
                    marked.append(slot)
        if (marked or unreadable) and core.write_names(directory, marked, sync=True):
            self._scrub(directory, [*marked, *unreadable])
        core.metrics.evictions.labels(reason="deleted").inc(len(stored))
        return len(stored)

    def _scrub(self, directory: Directory, slots: list[int]) -> None:
        core = self._core
        try:
            directory.scrub(slots)
        except OSError as error:
            core.fail(directory, "scrub", error)
            return
        with core.lock:
            for slot in slots:
                directory.table.clear(slot)
        if core.write_names(directory, slots, sync=True):
            with core.lock:
                directory.release_left()
