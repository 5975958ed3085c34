"""From the queue to the disk: data, then data made durable, then names, then found by readers."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable

from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.record import Name, finish_record
from epdserve.kvstore.ssd.write_behind import Pending


class Writer:
    """Stores batches. One at a time."""

    def __init__(self, core: TierCore) -> None:
        self._core = core

    def pump(self, limit: int) -> int:
        """Store up to ``limit`` of the blocks that wait; returns how many were taken from the queue."""
        core = self._core
        with core.io_lock:
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
            started = core.clock.monotonic()
            for index, members in by_directory.items():
                self._store(core.inventory.directories[index], members)
            if by_directory:
                core.metrics.batch_seconds.labels(operation="write").observe(core.clock.monotonic() - started)
            return len(batch)

    def _store(self, directory: Directory, members: list[tuple[Pending, Name]]) -> None:
        core = self._core
        by_slot = {pending.slot: pending for pending, _ in members}
        names = {pending.slot: name for pending, name in members}
        encoded: dict[int, bytes] = {}
        written = self._write_data(directory, by_slot, self._finisher(by_slot, names, encoded))
        if written:
            with core.lock:
                for slot in written:
                    directory.table.set_encoded(slot, encoded[slot])
            if not core.write_names(directory, written, sync=False):
                written = []
        leaving = []
        if directory.failed is not None:
            written = []
        with core.lock:
            for slot in written:
                replaced = core.inventory.add(directory, slot, names[slot])
                core.queue.done(by_slot.pop(slot))
                leaving += [replaced.directory] if replaced is not None else []
            for pending in by_slot.values():  # on a drive that failed
                self._give_up(pending, SlotState.QUARANTINED, "failed")
        core.metrics.took_up(stored=len(written) - len(leaving), replaced=len(leaving))
        for other in dict.fromkeys(leaving):
            core.settle(other)

    def _write_data(
        self, directory: Directory, by_slot: dict[int, Pending], finish: Callable[[int], None]
    ) -> list[int]:
        """Bring records to disk durably; returns the slots that are there and gives the others up."""
        core = self._core
        if directory.failed is not None:
            return []
        items = [(slot, self._chunks(pending)) for slot, pending in by_slot.items()]
        failed = directory.slots.write(items, first=finish)
        for slot, error in failed.items():
            core.note_error(directory, "write", error)
            state = SlotState.FREE if error.errno == errno.ENOSPC else SlotState.QUARANTINED
            with core.lock:
                self._give_up(by_slot.pop(slot), state, "failed")
        try:
            directory.slots.sync(by_slot)
        except OSError as error:
            core.metrics.io_errors.labels(operation="write").inc()
            core.fail(directory, "sync", error)
            return []
        core.metrics.written_bytes.inc(len(by_slot) * core.layout.slot_bytes)
        return list(by_slot)

    def _chunks(self, pending: Pending) -> tuple[Bytes, ...]:
        """The record in memory: in its buffer, or in the page it came in but for its end."""
        buffer, split = self._core.queue.buffers[pending.buffer], self._core.layout.end_offset
        return (buffer,) if pending.page is None else (pending.page[:split], buffer[split:])

    def _finisher(
        self, by_slot: dict[int, Pending], names: dict[int, Name], encoded: dict[int, bytes]
    ) -> Callable[[int], None]:
        layout, buffers = self._core.layout, self._core.queue.buffers

        def finish(slot: int) -> None:
            pending = by_slot[slot]
            encoded[slot] = finish_record(buffers[pending.buffer], layout, names[slot], pending.page)

        return finish

    def _give_up(self, pending: Pending, state: SlotState, result: str) -> None:
        core = self._core
        pending.directory.table.clear(pending.slot)
        pending.directory.move(pending.slot, state)
        core.inventory.uncount(pending.tenant, pending.reserve)
        core.queue.done(pending)
        core.metrics.stored.labels(result=result).inc()
