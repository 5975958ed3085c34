"""From the queue to the disk: data, then data made durable, then names, then found by readers."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.inventory import Place
from epdserve.kvstore.ssd.record import Name, finish_record, payload_crc32c
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
        written = self._write_data(directory, by_slot, names)
        if written:
            with core.lock:
                for slot in written:
                    directory.table.set(slot, names[slot])
            if not core.write_names(directory, written, sync=False):
                written = []
        leaving = []
        with core.lock:
            for slot in written if directory.failed is None else ():
                replaced = self._take_up(directory, by_slot.pop(slot), names[slot])
                leaving += [replaced.directory] if replaced is not None else []
            for pending in by_slot.values():  # on a drive that failed
                self._give_up(pending, SlotState.QUARANTINED, "failed")
        for other in dict.fromkeys(leaving):
            core.settle(other)

    def _write_data(
        self, directory: Directory, by_slot: dict[int, Pending], names: dict[int, Name]
    ) -> list[int]:
        """Bring records to disk durably; returns the slots that are there and gives the others up."""
        core = self._core
        if directory.failed is not None:
            return []
        items = [(slot, self._chunks(pending)) for slot, pending in by_slot.items()]
        failed = directory.slots.write(items, first=self._finisher(by_slot, names))
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

    def _finisher(self, by_slot: dict[int, Pending], names: dict[int, Name]) -> Callable[[int], None]:
        layout, buffers = self._core.layout, self._core.queue.buffers

        def finish(slot: int) -> None:
            pending = by_slot[slot]
            buffer = buffers[pending.buffer]
            header = replace(names[slot].header(), crc32c=0).encode()
            buffer[layout.payload_bytes : layout.page_bytes].data[:] = header
            names[slot] = replace(names[slot], payload_crc32c=payload_crc32c(buffer, layout, pending.page))
            finish_record(buffer, layout, names[slot])

        return finish

    def _take_up(self, directory: Directory, pending: Pending, name: Name) -> Place | None:
        core = self._core
        replaced = core.inventory.add(directory, pending.slot, name)
        core.queue.done(pending)
        core.metrics.stored.labels(result="stored" if replaced is None else "replaced").inc()
        if replaced is not None:
            core.metrics.evictions.labels(reason="replaced_by_exact").inc()
        return replaced

    def _give_up(self, pending: Pending, state: SlotState, result: str) -> None:
        core = self._core
        pending.directory.table.clear(pending.slot)
        pending.directory.move(pending.slot, state)
        core.inventory.uncount(pending.tenant, pending.reserve)
        core.queue.done(pending)
        core.metrics.stored.labels(result=result).inc()
