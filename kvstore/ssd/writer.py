"""From the queue to the disk: data, then data made durable, then names, then found by readers."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.inventory import Place
from epdserve.kvstore.ssd.slots import Flight
from epdserve.kvstore.ssd.write_behind import Pending


@dataclass(slots=True, eq=False)
class Portion:
    """Blocks of one directory on their way to disk."""

    directory: Directory
    members: list[Pending]
    now_s: int  # tier time: their last use
    started_at: float
    flight: Flight | None = None  # None: the drive failed before


class Writer:
    """Stores batches. One at a time: whoever calls holds the tier's ``io_lock`` from ``begin`` to ``finish``."""

    def __init__(self, core: TierCore) -> None:
        self._core = core

    def pump(self, limit: int) -> int:
        """Store up to ``limit`` of the blocks that wait; returns how many were taken from the queue."""
        with self._core.io_lock:
            waiting = self._core.queue.waiting
            self.finish(self.begin(limit))
            return min(waiting, limit)

    def begin(self, limit: int) -> list[Portion]:
        """Start to write up to ``limit`` of the blocks that wait."""
        core = self._core
        by_directory: dict[Directory, list[Pending]] = defaultdict(list)
        with core.lock:
            now_s, batch = core.time.now(), []
            for pending in core.queue.batch(limit):
                if pending.dropped:
                    self._give_up(pending, SlotState.FREE, "dropped")
                else:
                    batch.append(pending)
                    by_directory[pending.directory].append(pending)
            first = core.inventory.next_sequences(len(batch))
        buffers, names = [pending.buffer for pending in batch], core.queue.names
        names["sequence"][buffers] = np.arange(first, first + len(batch), dtype=np.uint64)
        names["stored_at"][buffers] = names["last_use"][buffers] = now_s
        return [self._begin(directory, members, now_s) for directory, members in by_directory.items()]

    def finish(self, portions: Sequence[Portion]) -> None:
        """Wait for what was begun, make it durable, name it, let it be found."""
        core = self._core
        for portion in portions:
            errors = {} if portion.flight is None else portion.flight().errors
            for at, error in errors.items():
                core.note_error(portion.directory, "write", error)
                state = SlotState.FREE if error.errno == errno.ENOSPC else SlotState.QUARANTINED
                with core.lock:
                    self._give_up(portion.members[at], state, "failed")
            if errors:
                portion.members = [one for at, one in enumerate(portion.members) if at not in errors]
        self._sync(portions)
        together: dict[Directory, list[Portion]] = defaultdict(list)
        for portion in portions:
            together[portion.directory].append(portion)
        leaving = [other for some in together.values() for other in self._take_up(some)]
        for other in dict.fromkeys(leaving):
            core.settle(other)
        if portions:
            taken_s = core.clock.monotonic() - min(portion.started_at for portion in portions)
            core.metrics.batch_seconds.labels(operation="write").observe(taken_s)

    def _begin(self, directory: Directory, members: list[Pending], now_s: int) -> Portion:
        portion = Portion(directory, members, now_s, self._core.clock.monotonic())
        if directory.failed is None:
            queue = self._core.queue
            bodies = [queue.buffers[one.buffer] if one.page is None else one.page for one in members]
            ends = [queue.ends[one.buffer] for one in members]
            portion.flight = directory.slots.begin_write([one.slot for one in members], bodies, ends)
        return portion

    def _sync(self, portions: Sequence[Portion]) -> None:
        core = self._core
        slots: dict[Directory, list[int]] = defaultdict(list)
        for portion in portions:
            slots[portion.directory] += [one.slot for one in portion.members]
        for directory, written in slots.items():
            if directory.failed is not None:
                continue
            try:
                directory.slots.sync(written)
            except OSError as error:
                core.metrics.io_errors.labels(operation="write").inc()
                core.fail(directory, "sync", error)
            else:
                core.metrics.written_bytes.inc(len(written) * core.layout.slot_bytes)

    def _take_up(self, portions: Sequence[Portion]) -> list[Directory]:
        """Name what was written of one directory and let it be found; returns where tainted blocks were replaced."""
        core, directory, now_s = self._core, portions[0].directory, portions[-1].now_s
        members = [pending for portion in portions for pending in portion.members]
        slots = [pending.slot for pending in members]
        written = bool(slots) and directory.failed is None
        if written:
            with core.lock:
                names = core.queue.names[[pending.buffer for pending in members]]
                directory.table.set_rows(slots, names)
            written = core.write_names(directory, slots, sync=False)
        replaced: list[Place] = []
        with core.lock:
            if written:
                replaced = core.inventory.add(directory, slots, [one.block_hash for one in members], now_s)
                core.queue.done(members)
            else:  # on a drive that failed
                for pending in members:
                    self._give_up(pending, SlotState.QUARANTINED, "failed")
        stored = len(members) - len(replaced) if written else 0
        core.metrics.took_up(stored=stored, replaced=len(replaced))
        return [rival.directory for rival in replaced]

    def _give_up(self, pending: Pending, state: SlotState, result: str) -> None:
        core = self._core
        pending.directory.table.clear(pending.slot)
        pending.directory.move(pending.slot, state)
        core.inventory.uncount(pending.tenant, pending.reserve)
        core.queue.done([pending])
        core.metrics.stored.labels(result=result).inc()
