"""The pages of one device: who owns each, what it holds, what may go. Facade of allocator and index.

Thread-safe: one lock, no I/O and no waiting under it. Every method decides before it changes anything, so a
raised error leaves all pages as they were.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from epdserve.kvstore.allocator import PageAllocator
from epdserve.kvstore.block_events import EventBuffer
from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import ConservationError, OutOfPages, WrongPhase
from epdserve.kvstore.metrics import BlockMetrics
from epdserve.kvstore.phases import Event, Phase, after
from epdserve.kvstore.prefix_index import Evicted, PrefixIndex
from epdserve.kvstore.types import BlockEvents, BlockHash, BlockInfo, Conservation, PageId


class Seal(NamedTuple):
    """A filled page and what it holds."""

    page: PageId
    block_hash: BlockHash
    checksum: int
    exact: bool


class _Block(NamedTuple):
    block_hash: BlockHash
    checksum: int
    exact: bool


class BlockManager:
    """Reserves, seals, shares and evicts the pages of one device."""

    def __init__(
        self,
        num_pages: int,
        clock: Clock | None = None,
        *,
        metrics: BlockMetrics | None = None,
        event_capacity: int = 65536,
    ) -> None:
        self._clock = clock or SystemClock()
        self._metrics = metrics or BlockMetrics.unregistered()
        self._lock = threading.Lock()
        self._allocator = PageAllocator(num_pages)
        self._index = PrefixIndex()
        self._events = EventBuffer(event_capacity)
        self._phases = [Phase.FREE] * num_pages
        self._counts = [num_pages if phase is Phase.FREE else 0 for phase in Phase]
        self._blocks: dict[PageId, _Block] = {}  # of SEALED and CACHED pages

    def match(self, hashes: Sequence[BlockHash], *, exact: bool, counted: bool = True) -> list[PageId]:
        """Longest held prefix of a chain, with one reference taken on each of its pages (SEALED).

        Args:
            hashes: Chain of a prompt, first block first.
            exact: Stop at the first block that encoder replay has tainted.
            counted: Whether the metrics count hits and misses; not if the same prompt is looked up again.

        Returns:
            Pages in the order of ``hashes``; the caller releases each once.
        """
        pages: list[PageId] = []
        with self._lock:
            for block_hash in hashes:
                page = self._index.get(block_hash)
                if page is None or (exact and not self._blocks[page].exact):
                    break
                self._hit(page)
                pages.append(page)
        if counted:
            self._metrics.matched(hits=len(pages), misses=len(hashes) - len(pages))
        return pages

    def peek(self, hashes: Sequence[BlockHash]) -> int:
        """Length of the longest held prefix in blocks.

        Takes no reference: it may be shorter a moment later.
        """
        with self._lock:
            for length, block_hash in enumerate(hashes):
                if self._index.get(block_hash) is None:
                    return length
        return len(hashes)

    def reserve(self, count: int) -> list[PageId]:
        """Take ``count`` pages for filling, evicting unreferenced blocks as needed: leaves first,the oldest of them.

        Raises:
            OutOfPages: Not even eviction yields that many. Nothing was evicted.
            ValueError: ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        victims: list[Evicted] = []
        with self._lock:
            available = self._allocator.free + self._index.evictable
            if count > available:
                self._metrics.refused()
                raise OutOfPages(count, available)
            victims = self._index.evict(count - self._allocator.free)
            for block_hash, page, _ in victims:
                self._events.note(block_hash, held=False)
                del self._blocks[page]
                self._allocator.give_back(page)
            self._step_all([victim.page for victim in victims], Event.EVICT)
            pages = [self._allocator.take() for _ in range(count)]
            self._step_all(pages, Event.RESERVE)
            now = self._clock.monotonic()
        self._metrics.evicted([now - victim.used_at for victim in victims])
        return pages

    def seal(
        self, page: PageId, block_hash: BlockHash, *, parent: BlockHash | None, exact: bool, checksum: int
    ) -> PageId:
        """``seal_chain`` of one block."""
        return self.seal_chain([Seal(page, block_hash, checksum, exact)], parent=parent)[0]

    def seal_chain(self, seals: Sequence[Seal], *, parent: BlockHash | None) -> list[PageId]:
        """Make filled pages immutable and shareable; returns the pages to use from now on, each referenced once.

        The first page sealed under a hash wins: a later one is freed and the first one referenced instead.
        Only an exact page replaces a tainted one; who still references the tainted page keeps it until
        release.

        Args:
            seals: Blocks that follow one another in a prompt.
            parent: The block before the first of them.

        Raises:
            WrongPhase: A page is not being filled, or named twice.
        """
        pages: list[PageId] = []
        fresh = 0
        with self._lock:
            self._require_each([seal.page for seal in seals], Event.SEAL)
            for seal in seals:
                page = self._seal(seal, parent)
                fresh += page == seal.page
                pages.append(page)
                parent = seal.block_hash
            self._counts[Phase.FILLING] -= fresh
            self._counts[Phase.SEALED] += fresh
        self._metrics.sealed(new=fresh, duplicates=len(pages) - fresh)
        return pages

    def pin(self, pages: Sequence[PageId]) -> None:
        """Take one more reference on each of ``pages``, which the caller must hold already. For leases.

        Raises:
            WrongPhase: A page is not SEALED.
        """
        with self._lock:
            for page in pages:
                self._require(page, Event.PIN)
            for page in pages:
                self._allocator.add_reference(page)

    def release(self, pages: Sequence[PageId]) -> None:
        """Drop one reference on each of ``pages``; a block without any stays as CACHED until evicted.

        Raises:
            WrongPhase: A page is not SEALED, or holds fewer references than ``pages`` names it.
        """
        with self._lock:
            for page, times in Counter(pages).items():
                self._require(page, Event.RELEASE)
                if self._allocator.references(page) < times:
                    raise WrongPhase(page, f"referenced {self._allocator.references(page)} times", "release")
            now = self._clock.monotonic()
            for page in pages:
                self._release(page, now)

    def abort(self, pages: Sequence[PageId]) -> None:
        """Free pages that were being filled.

        Raises:
            WrongPhase: A page is not FILLING.
        """
        self._move(pages, Event.ABORT)

    def quarantine(self, pages: Sequence[PageId]) -> None:
        """Set apart the destination of a transfer of unknown state: a late write may still land.

        Raises:
            WrongPhase: A page is not FILLING.
        """
        self._move(pages, Event.QUARANTINE)

    def transfer_over(self, pages: Sequence[PageId]) -> None:
        """Free quarantined pages: the transfer is known to be over, or its agent closed.

        Raises:
            WrongPhase: A page is not QUARANTINED.
        """
        self._move(pages, Event.TRANSFER_OVER)

    def forget_all(self) -> int:
        """Find no block that is held now; how many there were.

        Pages that are referenced stay with their readers until the last release, and are free then.
        """
        with self._lock:
            hashes = list(self._index.hashes())
            for block_hash in hashes:
                page = self._index.drop(block_hash)
                self._events.note(block_hash, held=False)
                if self._phases[page] is Phase.CACHED:
                    self._free(page, Event.RETIRE)
        self._metrics.forgotten(len(hashes))
        return len(hashes)

    def describe(self, page: PageId) -> BlockInfo:
        """``describe_all`` of one page."""
        return self.describe_all([page])[0]

    def describe_all(self, pages: Sequence[PageId]) -> list[BlockInfo]:
        """What a handle says of pages the caller holds.

        Raises:
            WrongPhase: A page is not SEALED.
        """
        with self._lock:
            for page in pages:
                self._require(page, Event.DESCRIBE)
            return [BlockInfo(page, self._allocator.generation(page), *self._blocks[page]) for page in pages]

    def available(self) -> int:
        """Pages a reservation could have now: free and evictable ones."""
        with self._lock:
            return self._allocator.free + self._index.evictable

    def counts(self) -> Conservation:
        """Pages by phase."""
        with self._lock:
            return self._conservation()

    def drain_events(self) -> BlockEvents:
        """Changes of the held set since the last call. One reader; it passes batches on to others."""
        with self._lock:
            return self._events.drain()

    def snapshot(self) -> tuple[int, tuple[BlockHash, ...]]:
        """(number of the next event, every hash held).

        Later batches may repeat what the snapshot holds already.
        """
        with self._lock:
            return self._events.next_seq, tuple(self._index.hashes())

    def check(self) -> None:
        """Recount everything.

        Raises:
            ConservationError: Pages, references or index do not add up.
        """
        with self._lock:
            problems = self._problems()
        if problems:
            raise ConservationError(problems)

    # -- under the lock -------------------------------------------------------------------------------------

    def _require(self, page: PageId, event: Event) -> Phase:
        if not 0 <= page < len(self._phases):
            raise WrongPhase(page, "unknown", event.name.lower())
        phase = after(self._phases[page], event)
        if phase is None:
            raise WrongPhase(page, self._phases[page].name.lower(), event.name.lower())
        return phase

    def _step(self, page: PageId, event: Event) -> None:
        phase = self._require(page, event)
        self._counts[self._phases[page]] -= 1
        self._counts[phase] += 1
        self._phases[page] = phase

    def _step_all(self, pages: Sequence[PageId], event: Event) -> None:
        """``_step`` of pages that are all in one phase."""
        if not pages:
            return
        former = self._phases[pages[0]]
        phase = self._require(pages[0], event)
        phases = self._phases
        for page in pages:
            assert phases[page] is former, f"page {page} is {phases[page].name}, not {former.name}"
            phases[page] = phase
        self._counts[former] -= len(pages)
        self._counts[phase] += len(pages)

    def _free(self, page: PageId, event: Event) -> None:
        self._step(page, event)
        self._blocks.pop(page, None)
        self._allocator.give_back(page)

    def _require_each(self, pages: Sequence[PageId], event: Event) -> None:
        for page in pages:
            self._require(page, event)
        if len(set(pages)) < len(pages):
            page, times = Counter(pages).most_common(1)[0]
            raise WrongPhase(page, f"named {times} times", event.name.lower())

    def _move(self, pages: Sequence[PageId], event: Event) -> None:
        with self._lock:
            self._require_each(pages, event)
            for page in pages:
                if self._require(page, event) is Phase.FREE:
                    self._free(page, event)
                else:
                    self._step(page, event)

    def _seal(self, seal: Seal, parent: BlockHash | None) -> PageId:
        """Seal one page whose phase was checked; the caller counts those that keep their block."""
        page, block_hash, checksum, exact = seal
        held = self._index.get(block_hash)
        if held is not None and (self._blocks[held].exact or not exact):
            self._free(page, Event.DUPLICATE)
            self._hit(held)
            return held
        if held is None:
            self._index.insert(block_hash, page, parent)
            self._events.note(block_hash, held=True)
        else:
            self._replace(held, page, block_hash)
        self._phases[page] = Phase.SEALED
        self._blocks[page] = _Block(block_hash, checksum, exact)
        self._allocator.add_reference(page)
        return page

    def _hit(self, page: PageId) -> None:
        if self._phases[page] is Phase.CACHED:
            self._index.hold(self._blocks[page].block_hash)
        self._step(page, Event.HIT)
        self._allocator.add_reference(page)

    def _release(self, page: PageId, now: float) -> None:
        if self._allocator.drop_reference(page):
            return
        block_hash = self._blocks[page].block_hash
        if self._index.get(block_hash) != page:  # replaced by an exact copy
            self._free(page, Event.RETIRE)
            return
        self._index.rest(block_hash, now)
        self._step(page, Event.LAST_RELEASE)

    def _replace(self, tainted: PageId, page: PageId, block_hash: BlockHash) -> None:
        if self._phases[tainted] is Phase.CACHED:
            self._index.hold(block_hash)
            self._free(tainted, Event.RETIRE)
        self._index.replace(block_hash, page)
        self._metrics.replaced()

    def _conservation(self) -> Conservation:
        by_phase = {phase.name.lower(): self._counts[phase] for phase in Phase}
        return Conservation(**by_phase, total=self._allocator.num_pages)

    def _problems(self) -> list[str]:
        problems = []
        counted = Counter(self._phases)
        for phase in Phase:
            if counted[phase] != self._counts[phase]:
                problems.append(
                    f"{counted[phase]} pages are {phase.name}, {self._counts[phase]} were counted"
                )
        if self._conservation().missing:
            problems.append(f"phases do not add up: {self._conservation()}")
        free = {page for page, phase in enumerate(self._phases) if phase is Phase.FREE}
        if free != set(self._allocator.free_pages()) or len(free) != self._allocator.free:
            problems.append("free list and free pages differ")
        for page_number, phase in enumerate(self._phases):
            page = PageId(page_number)
            if (self._allocator.references(page) > 0) != (phase is Phase.SEALED):
                problems.append(
                    f"page {page} is {phase.name} with {self._allocator.references(page)} references"
                )
            if (page in self._blocks) != (phase in (Phase.SEALED, Phase.CACHED)):
                problems.append(f"page {page} is {phase.name}, which does not fit its block")
            if phase is Phase.CACHED and self._index.get(self._blocks[page].block_hash) != page:
                problems.append(f"page {page} is cached and not in the index")
        recounted = self._index.recount()
        if recounted != (len(self._index), self._index.evictable):
            problems.append(
                f"index counts {(len(self._index), self._index.evictable)}, recount gives {recounted}"
            )
        return problems
