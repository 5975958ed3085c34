"""From the disk to a reader's pages: what arrives is the block that was asked for, to the bit, or it is a miss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.block_header import BlockHeader, Checksum
from epdserve.kvstore.checksums import sum_blocks
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.inventory import Place
from epdserve.kvstore.ssd.record import restore_page, verify_record
from epdserve.kvstore.ssd.slots import Flight, aligned, is_aligned
from epdserve.kvstore.types import BlockHash

PORTION = 256  # blocks read at once: bounds the buffers of pages that direct I/O cannot use
_FEW: Final = 16  # blocks that are not worth a call of their own


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
    """What one drive was asked for."""

    directory: Directory
    wanted: list[_Wanted]
    flight: Flight


class Reader:
    """Thread-safe: any number of batches at once. Takes no lock while it reads."""

    def __init__(self, core: TierCore, checksum: Checksum) -> None:
        self._core, self._checksum = core, checksum

    def get(self, hashes: Sequence[BlockHash], pages: Sequence[Bytes]) -> list[BlockHeader | None]:
        """Read a portion; ``None`` is a miss. A part of it is verified here while the next ones are read."""
        core = self._core
        started = core.clock.monotonic()
        with core.lock:
            ordered = core.inventory.in_disk_order(hashes)
        readings: list[_Reading] = []
        step = max(_FEW, *(directory.slots.run_slots for directory in core.inventory.directories))
        for first in range(0, len(ordered), step):  # some are on their way while the next are looked up
            readings += self._begin_step(ordered[first : first + step], hashes, pages)
        found: list[BlockHeader | None] = [None] * len(hashes)
        for reading in readings:
            self._take(reading, pages, found)
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
        wanted: list[_Wanted] = []
        for (at, place), page in zip(members, direct, strict=True):
            buffer = next(spare) if page is None else page
            name = place.name
            header = BlockHeader(name.block_hash, name.checksum, name.payload_bytes, name.exact)
            wanted.append(_Wanted(at, place, header, buffer, direct=page is not None))
        slots = [one.place.slot for one in wanted]
        return _Reading(directory, wanted, directory.slots.begin_read(slots, [one.buffer for one in wanted]))

    def _take(self, reading: _Reading, pages: Sequence[Bytes], found: list[BlockHeader | None]) -> None:
        """Wait for blocks, verify them, and finish the pages of what is sound."""
        layout, landed = self._core.layout, reading.flight()
        for at, error in landed.errors.items():
            self._core.note_error(reading.directory, "read", error)
            self._forget(reading.wanted[at].place, "io_error")
        arrived = [one for at, one in enumerate(reading.wanted) if at not in landed.errors]
        crcs = [crc for at, crc in enumerate(landed.crcs) if at not in landed.errors]
        sums = sum_blocks(self._checksum, [one.buffer for one in arrived], [one.header for one in arrived])
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


def _whole_slot(page: Bytes, slot_bytes: int) -> Bytes | None:
    """The part of a page that direct I/O can fill with a record, if there is room for one."""
    if page.nbytes < slot_bytes or not is_aligned(page):
        return None
    return page[:slot_bytes]
