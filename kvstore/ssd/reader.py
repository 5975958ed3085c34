"""From the disk to a reader's pages: what arrives is the block that was asked for, to the bit, or it is a miss."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.block_header import BlockHeader, Checksum
from epdserve.kvstore.checksums import sum_blocks
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.native import crc32c_of
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.inventory import Place
from epdserve.kvstore.ssd.record import restore_page, verify_record
from epdserve.kvstore.ssd.slots import Flight, aligned, is_aligned
from epdserve.kvstore.types import BlockHash

PORTION = 256  # blocks read at once: bounds the buffers of pages that direct I/O cannot use
_VERIFY: Final = 16


@dataclass(slots=True, eq=False)
class _Wanted:
    """A block on its way from one drive."""

    at: int  # its number among the blocks asked for
    place: Place
    header: BlockHeader
    buffer: Bytes  # where the record arrives
    direct: bool  # that is the page itself


@dataclass(slots=True, eq=False)
class _Reading:
    """What one drive was asked for; runs arrive one after the other."""

    directory: Directory
    by_buffer: dict[int, _Wanted]  # by identity: a block may be asked for twice
    flights: list[Flight]


class Reader:
    """Thread-safe: any number of batches at once. Takes no lock while it reads."""

    def __init__(self, core: TierCore, checksum: Checksum) -> None:
        self._core, self._checksum = core, checksum

    def get(self, hashes: Sequence[BlockHash], pages: Sequence[Bytes]) -> list[BlockHeader | None]:
        """Read a portion; ``None`` is a miss. One run is verified here while threads read the next ones."""
        core = self._core
        started = core.clock.monotonic()
        with core.lock:
            ordered = core.inventory.in_disk_order(hashes)
        readings: list[_Reading] = []
        step = max(directory.slots.run_slots for directory in core.inventory.directories)
        for first in range(
            0, len(ordered), step
        ):  # the first run is on its way while the next is taken apart
            readings += self._begin_step(ordered[first : first + step], hashes, pages)
            time.sleep(0)  # lets go of Python's lock: a thread cannot begin without it
        found: list[BlockHeader | None] = [None] * len(hashes)
        for reading in readings:
            for flights in _groups(reading.flights):
                self._take(reading, flights, pages, found)
        hits = [block_hash for block_hash, header in zip(hashes, found, strict=True) if header is not None]
        with core.lock:
            core.inventory.touch(hits, core.time.now())
        core.metrics.reads.labels(result="hit").inc(len(hits))
        core.metrics.reads.labels(result="miss").inc(len(hashes) - len(hits))
        core.metrics.read_bytes.inc(len(hits) * core.layout.slot_bytes)
        core.metrics.batch_seconds.labels(operation="read").observe(core.clock.monotonic() - started)
        return found

    def _begin_step(
        self, numbers: Sequence[int], hashes: Sequence[BlockHash], pages: Sequence[Bytes]
    ) -> list[_Reading]:
        inventory = self._core.inventory
        with self._core.lock:
            places = [inventory.find(hashes[at]) for at in numbers]
        wanted: dict[Directory, list[tuple[int, Place]]] = defaultdict(list)
        for at, place in zip(numbers, places, strict=True):
            if place is not None:
                wanted[place.directory].append((at, place))
        return [self._begin(directory, members, pages) for directory, members in wanted.items()]

    def _begin(
        self, directory: Directory, members: Sequence[tuple[int, Place]], pages: Sequence[Bytes]
    ) -> _Reading:
        slot_bytes = self._core.layout.slot_bytes
        direct = [_whole_slot(pages[at], slot_bytes) for at, _ in members]
        spare = iter(aligned(sum(buffer is None for buffer in direct), slot_bytes))
        by_buffer: dict[int, _Wanted] = {}
        items: list[tuple[int, Bytes]] = []
        for (at, place), page in zip(members, direct, strict=True):
            buffer = next(spare) if page is None else page
            name = place.name
            header = BlockHeader(name.block_hash, name.checksum, name.payload_bytes, name.exact)
            by_buffer[id(buffer)] = _Wanted(at, place, header, buffer, direct=page is not None)
            items.append((place.slot, buffer))
        return _Reading(directory, by_buffer, directory.slots.begin_read(items))

    def _take(
        self,
        reading: _Reading,
        flights: Sequence[Flight],
        pages: Sequence[Bytes],
        found: list[BlockHeader | None],
    ) -> None:
        """Wait for runs, verify them, and finish the pages of what is sound."""
        layout = self._core.layout
        arrived = []
        for flight in flights:
            failed = flight.failed()
            for slot, (buffer,) in flight.items():
                wanted = reading.by_buffer[id(buffer)]
                if slot in failed:
                    self._core.note_error(reading.directory, "read", failed[slot])
                    self._forget(wanted.place, "io_error")
                else:
                    arrived.append(wanted)
        buffers = [wanted.buffer for wanted in arrived]
        sums = sum_blocks(self._checksum, buffers, [wanted.header for wanted in arrived])
        crcs = crc32c_of(buffers, layout.covered_bytes)
        for wanted, total, crc in zip(arrived, sums, crcs, strict=True):
            try:
                verify_record(wanted.buffer, layout, wanted.place.name, total, crc)
            except CorruptBlock:
                self._forget(wanted.place, "corrupt")
                continue
            restore_page(wanted.buffer, layout)
            if not wanted.direct:
                pages[wanted.at][: layout.page_bytes] = wanted.buffer[: layout.page_bytes]
                pages[wanted.at][layout.page_bytes :] = 0
            found[wanted.at] = wanted.header

    def _forget(self, place: Place, reason: str) -> None:
        """A record that is not what its name says, or cannot be read, is dropped and its slot left alone.

        A slot that was evicted and written again since it was looked up is no such thing: just a miss.
        """
        core = self._core
        with core.lock:
            if place.directory.failed is not None or not core.inventory.still_there(place):
                return
            core.inventory.remove(place, SlotState.QUARANTINED)
        core.metrics.evictions.labels(reason=reason).inc()


def _groups(flights: Sequence[Flight]) -> Iterator[list[Flight]]:
    """Runs that are verified in one call: short ones together, for each call and each wait costs as much."""
    group: list[Flight] = []
    for flight in flights:
        group.append(flight)
        if sum(len(run.slots) for one in group for run in one.runs) >= _VERIFY:
            yield group
            group = []
    if group:
        yield group


def _whole_slot(page: Bytes, slot_bytes: int) -> Bytes | None:
    """The part of a page that direct I/O can fill with a record, if there is room for one."""
    if page.nbytes < slot_bytes or not is_aligned(page):
        return None
    return page[:slot_bytes]
