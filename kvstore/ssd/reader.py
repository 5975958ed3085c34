"""From the disk to a reader's pages: what arrives is the block that was asked for, to the bit, or it is a miss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from epdserve.kvstore.block_header import BlockHeader, Checksum
from epdserve.kvstore.errors import CorruptBlock
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.directory import Directory, SlotState
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.inventory import Place
from epdserve.kvstore.ssd.record import restore_page, verify_record
from epdserve.kvstore.ssd.slots import aligned, is_aligned
from epdserve.kvstore.types import BlockHash

PORTION = 256  # blocks read at once: bounds the buffers of pages that direct I/O cannot use


class Reader:
    """Thread-safe: any number of batches at once. Takes no lock while it reads."""

    def __init__(self, core: TierCore, checksum: Checksum) -> None:
        self._core, self._checksum = core, checksum

    def get(self, hashes: Sequence[BlockHash], pages: Sequence[Bytes]) -> list[BlockHeader | None]:
        """Read a portion; ``None`` is a miss."""
        core = self._core
        started = core.clock.monotonic()
        with core.lock:
            places = [core.inventory.find(block_hash) for block_hash in hashes]
        found: list[BlockHeader | None] = [None] * len(hashes)
        wanted: dict[int, list[tuple[int, Place]]] = defaultdict(list)
        for at, place in enumerate(places):
            if place is not None:
                wanted[core.inventory.directories.index(place.directory)].append((at, place))
        for index, members in wanted.items():
            self._read(core.inventory.directories[index], members, pages, found)
        hits = [block_hash for block_hash, header in zip(hashes, found, strict=True) if header is not None]
        with core.lock:
            core.inventory.touch(hits, core.time.now())
        core.metrics.reads.labels(result="hit").inc(len(hits))
        core.metrics.reads.labels(result="miss").inc(len(hashes) - len(hits))
        core.metrics.read_bytes.inc(len(hits) * core.layout.slot_bytes)
        core.metrics.batch_seconds.labels(operation="read").observe(core.clock.monotonic() - started)
        return found

    def _read(
        self,
        directory: Directory,
        members: Sequence[tuple[int, Place]],
        pages: Sequence[Bytes],
        found: list[BlockHeader | None],
    ) -> None:
        core, layout = self._core, self._core.layout
        direct = {at: _whole_slot(pages[at], layout.slot_bytes) for at, _ in members}
        spare = iter(aligned(sum(buffer is None for buffer in direct.values()), layout.slot_bytes))
        buffers = {at: buffer if buffer is not None else next(spare) for at, buffer in direct.items()}
        by_buffer = {id(buffers[at]): (at, place) for at, place in members}  # a block may be asked for twice
        bad: list[Place] = []

        def take(slot: int, buffer: Bytes) -> None:
            at, place = by_buffer[id(buffer)]
            try:
                verify_record(buffer, layout, place.name, self._checksum)
            except CorruptBlock:
                bad.append(place)
                return
            restore_page(buffer, layout)
            if direct[at] is None:
                pages[at][: layout.page_bytes] = buffer[: layout.page_bytes]
                pages[at][layout.page_bytes :] = 0
            name = place.name
            found[at] = BlockHeader(name.block_hash, name.checksum, name.payload_bytes, name.exact)

        failed = directory.slots.read([(place.slot, buffers[at]) for at, place in members], then=take)
        for place in bad:
            self._forget(place, "corrupt")
        for place in [place for _, place in members if place.slot in failed]:
            core.note_error(directory, "read", failed[place.slot])
            self._forget(place, "io_error")

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
