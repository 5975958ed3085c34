"""From the queue to the disk: data, then data made durable, then names, then found by readers."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.record import NAME_BYTES, Chunks, Name, lay_out_end, seal
from epdserve.kvstore.ssd.slots import Flight, landed
from epdserve.kvstore.ssd.write_behind import Pending


@dataclass(slots=True, eq=False)
class Portion:
    """Blocks of one directory on their way to disk."""

    directory: Directory
    by_slot: dict[int, Pending]
    names: dict[int, Name]
    started_at: float
    flights: list[Flight] = field(default_factory=list)


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
        by_directory: dict[Directory, list[tuple[Pending, Name]]] = defaultdict(list)
        with core.lock:
            batch = core.queue.batch(limit)
            now = core.time.now()
            for pending in batch:
                if pending.dropped:
                    self._give_up(pending, SlotState.FREE, "dropped")
                    continue
                name = pending.name(sequence=core.inventory.next_sequence(), now_s=now)
                by_directory[pending.directory].append((pending, name))
        return [self._begin(directory, members) for directory, members in by_directory.items()]

    def finish(self, portions: Sequence[Portion]) -> None:
        """Wait for what was begun, make it durable, name it, let it be found."""
        core = self._core
        for portion in portions:
            for slot, error in landed(portion.flights).items():
                core.note_error(portion.directory, "write", error)
                state = SlotState.FREE if error.errno == errno.ENOSPC else SlotState.QUARANTINED
                with core.lock:
                    self._give_up(portion.by_slot.pop(slot), state, "failed")
        self._sync(portions)
        leaving = [other for portion in portions for other in self._take_up(portion)]
        for other in dict.fromkeys(leaving):
            core.settle(other)
        if portions:
            taken_s = core.clock.monotonic() - min(portion.started_at for portion in portions)
            core.metrics.batch_seconds.labels(operation="write").observe(taken_s)

    def _begin(self, directory: Directory, members: list[tuple[Pending, Name]]) -> Portion:
        by_slot = {pending.slot: pending for pending, _ in members}
        names = {pending.slot: name for pending, name in members}
        portion = Portion(directory, by_slot, names, self._core.clock.monotonic())
        if directory.failed is None:
            step = directory.slots.run_slots  # one run is on its way while the next is laid out
            for start in range(0, len(members), step):
                items = [(one.slot, self._lay_out(one, name)) for one, name in members[start : start + step]]
                seal([chunks for _, chunks in items], self._core.layout)
                portion.flights += directory.slots.begin_write(items)
        return portion

    def _sync(self, portions: Sequence[Portion]) -> None:
        core = self._core
        slots: dict[Directory, list[int]] = defaultdict(list)
        for portion in portions:
            slots[portion.directory] += portion.by_slot
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

    def _take_up(self, portion: Portion) -> list[Directory]:
        """Name what was written and let it be found; returns where tainted blocks were replaced, by block."""
        core, directory, by_slot = self._core, portion.directory, portion.by_slot
        name_at = core.layout.page_bytes - core.layout.end_offset
        written = list(by_slot) if directory.failed is None else []
        if written:
            with core.lock:
                for slot in written:
                    end = core.queue.ends[by_slot[slot].buffer]
                    directory.table.set_encoded(slot, end.data[name_at : name_at + NAME_BYTES])
            if not core.write_names(directory, written, sync=False):
                written = []
        leaving = []
        with core.lock:
            for slot in written:
                replaced = core.inventory.add(directory, slot, portion.names[slot])
                core.queue.done(by_slot.pop(slot))
                leaving += [replaced.directory] if replaced is not None else []
            for pending in by_slot.values():  # on a drive that failed
                self._give_up(pending, SlotState.QUARANTINED, "failed")
        core.metrics.took_up(stored=len(written) - len(leaving), replaced=len(leaving))
        return leaving

    def _lay_out(self, pending: Pending, name: Name) -> Chunks:
        """The record: in its buffer, or in the page it came in but for its end."""
        layout, queue = self._core.layout, self._core.queue
        end = queue.ends[pending.buffer]
        lay_out_end(end.data, layout, name)
        body = queue.buffers[pending.buffer] if pending.page is None else pending.page
        return (body[: layout.end_offset], end) if layout.end_offset else (end,)

    def _give_up(self, pending: Pending, state: SlotState, result: str) -> None:
        core = self._core
        pending.directory.table.clear(pending.slot)
        pending.directory.move(pending.slot, state)
        core.inventory.uncount(pending.tenant, pending.reserve)
        core.queue.done(pending)
        core.metrics.stored.labels(result=result).inc()
