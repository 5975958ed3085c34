"""Readers of a source that recycles its pages under them, on a virtual clock: who would have accepted wrong bytes?

Real ``BlockManager``, ``LeaseTable``, headers and checksums on both sides, and real bytes; only time and the wire are
made up. A transfer copies a page in pieces at random moments. Meanwhile the source evicts and refills pages (leases
that ran out let it), scribbles over pinned ones as a bug or a foreign write would, and restarts with its memory as it
was. Recycled pages hold other valid blocks, the same name with other bytes, halves, or garbage. Readers stall, give up
at a deadline, and their transfers land late.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from epdserve.kernels.checksum import host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader, verify_block
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.errors import CorruptBlock, OutOfPages
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.types import BlockHash, LeaseId, PageId
from support.manual_clock import ManualClock

PAYLOAD: Final = 160
SOUND: Final = PAYLOAD + HEADER_BYTES  # what is promised of a page; zeros behind
PIECE: Final = 64  # a transfer's and a writer's step: the header straddles two
PAGE: Final = 256
_NAMES: Final = 400  # few, so that a name comes back with other bytes
_TTL_S: Final = 1.0
_DEADLINE_S: Final = 2.5  # of a reader; past its lease, so that leases run out under transfers


@dataclass(slots=True)
class Read:
    """One page on its way."""

    header: BlockHeader
    source_page: PageId
    target_page: PageId
    lease: LeaseId
    incarnation: int
    promised: bytes
    clock_ends_at: float  # the lease's end as the reader's clock has it, from when the handle arrived
    deadline: float
    stalled_until: float
    done_bytes: int = 0
    late: bool = False


@dataclass(slots=True)
class Tally:
    """What happened."""

    recycles: int = 0
    under_a_transfer: int = 0
    reads: int = 0
    wrong_reads: int = 0
    late_pieces: int = 0
    accepted: int = 0
    accepted_wrong: int = 0  # by the reader under test
    spoiled_later: int = 0  # accepted, and changed afterwards
    wrong_by: Counter[str] = field(
        default_factory=Counter
    )  # wrong bytes that a lesser reader would have taken

    def __str__(self) -> str:
        others = ", ".join(f"{who} {count}" for who, count in sorted(self.wrong_by.items()))
        return (
            f"{self.recycles} recycles, {self.under_a_transfer} of them under a transfer; {self.reads} reads, "
            f"{self.wrong_reads} brought other bytes than promised; {self.late_pieces} pieces landed late; "
            f"accepted {self.accepted}, of them wrong {self.accepted_wrong}, spoiled later {self.spoiled_later}; "
            f"wrong ones that lesser readers would have accepted: {others}"
        )


class World:
    """One source, one reader's pages, some transfers under way. The same seed gives the same life."""

    def __init__(self, seed: int, *, source_pages: int = 24, target_pages: int = 24, reads: int = 12) -> None:
        self.dice = random.Random(seed)
        self.clock = ManualClock()
        self.tally = Tally()
        self.noise = self.dice.randbytes(1 << 16)
        self.source_memory = bytearray(source_pages * PAGE)
        self.target_memory = bytearray(target_pages * PAGE)
        self.target = BlockManager(target_pages, self.clock)
        self.max_reads = reads
        self.reads: list[Read] = []
        self.kept: dict[PageId, bytes] = {}  # accepted pages and what they held then
        self.incarnation = 0
        self.source_pages = source_pages
        self._start_source()

    def run(self, recycles: int) -> Tally:
        """Live until so many pages were recycled; then let every transfer land, and recount."""
        while self.tally.recycles < recycles:
            self.step()
        while self.reads:
            self.clock.advance(0.05)
            self._advance(self.reads[-1])
        self._look_after_kept(list(self.kept))
        self.source.check()
        self.target.check()
        return self.tally

    def step(self) -> None:
        """One thing happens."""
        self.clock.advance(self.dice.expovariate(50.0))
        chance = self.dice.random()
        if chance < 0.35:
            self._recycle()
        elif chance < 0.55:
            self._begin()
        elif chance < 0.93:
            if self.reads:
                self._advance(self.dice.choice(self.reads))
        elif chance < 0.95:
            self._scribble()
        elif chance < 0.9995:
            self.leases.expire()
        else:
            self._start_source()

    # -- the source -----------------------------------------------------------------------------------------

    def _start_source(self) -> None:
        """A new incarnation over the memory of the old one; all leases are gone."""
        self.incarnation += 1
        self.source = BlockManager(self.source_pages, self.clock)
        self.leases = LeaseTable(self.clock)
        self.names: list[BlockHash] = []
        self.sealed: dict[PageId, bytes] = {}

    def _recycle(self) -> None:
        try:
            (page,) = self.source.reserve(1)
        except OutOfPages:
            self.leases.expire()
            return
        header, page_bytes = self._new_block()
        self._write(page, page_bytes)
        name, checksum = header.block_hash, header.checksum
        kept = self.source.seal(page, name, parent=None, exact=True, checksum=checksum)
        if kept == page:  # else the name is held already, perhaps with other bytes
            self.sealed[page] = page_bytes[:SOUND]
        self.source.release([kept])
        self.names.append(header.block_hash)
        del self.names[:-64]

    def _scribble(self) -> None:
        """Somebody writes where he must not: a bug's or a foreign transfer's doing, leases or not."""
        page = PageId(self.dice.choice(self.reads).source_page) if self.reads else PageId(0)
        kind = self.dice.random()
        if kind < 0.5:
            _, content = self._new_block()
        elif kind < 0.75:
            at = page * PAGE  # half of another block under the header that is there
            content = self._new_block()[1][: PAGE // 4] + bytes(
                self.source_memory[at + PAGE // 4 : at + PAGE]
            )
        else:
            content = self._noise(PAGE)
        self._write(page, content)

    def _write(self, page: PageId, content: bytes) -> None:
        """Piece by piece, with transfers reading in between."""
        self.tally.recycles += 1
        self.tally.under_a_transfer += any(read.source_page == page for read in self.reads)
        at = page * PAGE
        for start in range(0, PAGE, PIECE):
            self.source_memory[at + start : at + start + PIECE] = content[start : start + PIECE]
            if self.reads and self.dice.random() < 0.3:
                self._advance(self.dice.choice(self.reads))

    def _new_block(self) -> tuple[BlockHeader, bytes]:
        payload = self._noise(PAYLOAD)
        name = BlockHash(self.dice.randrange(_NAMES).to_bytes(16, "little"))
        header = BlockHeader(name, host_checksum(memoryview(payload), name), PAYLOAD, exact=True)
        return header, payload + header.encode() + bytes(PAGE - SOUND)

    def _noise(self, nbytes: int) -> bytes:
        at = self.dice.randrange(len(self.noise) - nbytes)
        return self.noise[at : at + nbytes]

    # -- the reader -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if len(self.reads) >= self.max_reads or not self.names:
            return
        pages = self.source.match([self.dice.choice(self.names)], exact=False)
        if not pages:
            return
        source, info = self.source, self.source.describe(pages[0])
        lease = self.leases.grant(_TTL_S, lambda: source.release(pages))
        try:
            (target,) = self.target.reserve(1)
        except OutOfPages:
            self.leases.end(lease)
            return
        self._look_after_kept([target])
        now = self.clock.monotonic()
        stall = self.dice.random()
        self.reads.append(
            Read(
                header=BlockHeader(info.block_hash, info.checksum, PAYLOAD, info.exact),
                source_page=pages[0],
                target_page=target,
                lease=lease,
                incarnation=self.incarnation,
                promised=self.sealed[pages[0]],
                clock_ends_at=now + _TTL_S + self.dice.random() * 0.5,
                deadline=now + _DEADLINE_S,
                stalled_until=now + (self.dice.uniform(0.5, 4.0) if stall < 0.3 else 0.0),
            )
        )

    def _advance(self, read: Read) -> None:
        """The next piece arrives, unless somebody is stopped; the last one is followed by the verdict."""
        now = self.clock.monotonic()
        if not read.late and now >= read.deadline:
            read.late = True
            self.target.quarantine([read.target_page])
            if read.incarnation == self.incarnation:
                self.leases.end(read.lease)
        if now < read.stalled_until:
            return
        start, source_at, target_at = read.done_bytes, read.source_page * PAGE, read.target_page * PAGE
        self.target_memory[target_at + start : target_at + start + PIECE] = self.source_memory[
            source_at + start : source_at + start + PIECE
        ]
        read.done_bytes += PIECE
        self.tally.late_pieces += read.late
        if read.done_bytes == PAGE:
            self.reads.remove(read)
            if read.late:
                self.target.transfer_over([read.target_page])
            else:
                self._judge(read, now)

    def _judge(self, read: Read, now: float) -> None:
        at = read.target_page * PAGE
        found = memoryview(self.target_memory)[at : at + PAGE]
        wrong = found[:SOUND] != read.promised
        held = read.incarnation == self.incarnation and self.leases.end(read.lease)
        sound = _sound(found, read.header)
        self.tally.reads += 1
        self.tally.wrong_reads += wrong
        if wrong:
            named = found[PAYLOAD + 8 : PAYLOAD + 24] == read.header.block_hash
            self.tally.wrong_by["lease by the reader's clock"] += now < read.clock_ends_at
            self.tally.wrong_by["lease by its owner's word"] += held
            self.tally.wrong_by["lease and name of the block"] += held and named
        if not (sound and held):
            self.target.abort([read.target_page])
            return
        self.tally.accepted += 1
        self.tally.accepted_wrong += wrong
        name, checksum = read.header.block_hash, read.header.checksum
        page = self.target.seal(read.target_page, name, parent=None, exact=True, checksum=checksum)
        if page == read.target_page:
            self.kept[page] = bytes(found)
        self.target.release([page])

    def _look_after_kept(self, pages: list[PageId]) -> None:
        """Whether pages that were accepted, and go now, still hold what they held then."""
        for page in pages:
            kept = self.kept.pop(page, None)
            self.tally.spoiled_later += kept is not None and self.target_memory[page * PAGE :][:PAGE] != kept


def _sound(found: memoryview, header: BlockHeader) -> bool:
    try:
        verify_block(found, header, host_checksum)
    except CorruptBlock:
        return False
    return True
