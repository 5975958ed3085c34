"""From the queue to the disk: data, then data made durable, then names, then found by readers."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.record import Name, finish_record
from epdserve.kvstore.ssd.write_behind import Pending


@dataclass(slots=True, eq=False)
class Portion:
    """Blocks of one directory on their way to disk."""

    directory: Directory
    by_slot: dict[int, Pending]
    names: dict[int, Name]
    started_at: float
    collect: Callable[[], dict[int, OSError]] = dict  # waits, and says what failed
    encoded: dict[int, bytes] = field(default_factory=dict)  # names as they stand in the records


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
        by_directory: dict[int, list[tuple[Pending, Name]]] = defaultdict(list)
        with core.lock:
            batch = core.queue.batch(limit)
            now = core.time.now()
            for pending in batch:
                if pending.dropped:
                    self._give_up(pending, SlotState.FREE, "dropped")
                    continue
                name = pending.name(sequence=core.inventory.next_sequence(), now_s=now)
                by_directory[core.inventory.directories.index(pending.directory)].append((pending, name))
        directories = core.inventory.directories
        return [self._begin(directories[index], members) for index, members in by_directory.items()]

    def finish(self, portions: Sequence[Portion]) -> None:
        """Wait for what was begun, make it durable, name it, let it be found."""
        core = self._core
        for portion in portions:
            for slot, error in portion.collect().items():
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
            items = [(slot, self._chunks(pending)) for slot, pending in by_slot.items()]
            portion.collect = directory.slots.begin_write(items, first=self._finisher(portion))
        return portion

    def _sync(self, portions: Sequence[Portion]) -> None:
        core = self._core
        slots: dict[int, list[int]] = defaultdict(list)
        for portion in portions:
            slots[core.inventory.directories.index(portion.directory)] += portion.by_slot
        for index, written in slots.items():
            directory = core.inventory.directories[index]
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
        written = list(by_slot) if directory.failed is None else []
        if written:
            with core.lock:
                for slot in written:
                    directory.table.set_encoded(slot, portion.encoded[slot])
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

    def _chunks(self, pending: Pending) -> tuple[Bytes, ...]:
        """The record in memory: in its buffer, or in the page it came in but for its end."""
        buffer, split = self._core.queue.buffers[pending.buffer], self._core.layout.end_offset
        return (buffer,) if pending.page is None else (pending.page[:split], buffer[split:])

    def _finisher(self, portion: Portion) -> Callable[[int], None]:
        layout, buffers = self._core.layout, self._core.queue.buffers
        by_slot, names = portion.by_slot, portion.names

        def finish(slot: int) -> None:
            pending = by_slot[slot]
            record = buffers[pending.buffer]
            portion.encoded[slot] = finish_record(record, layout, names[slot], pending.page)

        return finish

    def _give_up(self, pending: Pending, state: SlotState, result: str) -> None:
        core = self._core
        pending.directory.table.clear(pending.slot)
        pending.directory.move(pending.slot, state)
        core.inventory.uncount(pending.tenant, pending.reserve)
        core.queue.done(pending)
        core.metrics.stored.labels(result=result).inc()
