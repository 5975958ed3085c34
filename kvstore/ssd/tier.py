"""The SSD tier: blocks go in behind the caller's back and come out exact, or not at all.

One owner a directory. ``try_put``, ``contains``, ``longest_prefix`` and ``touch`` never wait for a disk; ``get_batch``
reads in its caller's thread and a pool; ``pump`` and ``sweep`` write, in a thread of the tier's own after ``start``,
or in whoever calls them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from epdserve.kvstore.block_header import BlockHeader, Checksum
from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import ConservationError
from epdserve.kvstore.ssd.core import TierCore
from epdserve.kvstore.ssd.crew import crew_of
from epdserve.kvstore.ssd.directory import SLOTS_PER_FILE, Directory
from epdserve.kvstore.ssd.disk import Bytes, Disk, SystemDisk
from epdserve.kvstore.ssd.errors import DirectoryOwned, NoUsableDirectory, WrongFormat
from epdserve.kvstore.ssd.figures import Figures
from epdserve.kvstore.ssd.intake import MAY_PASS, Intake
from epdserve.kvstore.ssd.inventory import Inventory
from epdserve.kvstore.ssd.keeper import Keeper
from epdserve.kvstore.ssd.metrics import SsdMetrics
from epdserve.kvstore.ssd.pacing import EnduranceBudget, SecondHit, TierTime
from epdserve.kvstore.ssd.reader import PORTION, Reader
from epdserve.kvstore.ssd.record import RecordLayout
from epdserve.kvstore.ssd.retention import Admission, RetentionPolicy
from epdserve.kvstore.ssd.write_behind import ID_BYTES, BlockPut, WriteBehind
from epdserve.kvstore.ssd.writer import Portion, Writer
from epdserve.kvstore.types import BlockEvents, BlockHash

# Beyond so many, older ones are made durable and named while newer ones are written: each time costs a sync
_UNDER_WAY_BLOCKS: Final = 256
_RUNS_A_STEP: Final = 4  # of the longest transfers, that are let in together
_IDLE_S: Final = 1.0  # how often the tier's thread looks around when nothing comes
_SAVE_USE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class DirectorySpec:
    """A drive's directory and what the tier may take of it, all of it allocated at start."""

    folder: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class SsdSettings:
    """How the tier works; ``RetentionPolicy`` says what it keeps."""

    write_behind_blocks: int = 256  # 28 MiB of the real model's blocks
    batch_blocks: int = 128
    io_threads: int = 4  # a drive; 0 does all I/O in the caller's thread, one call after the other
    bytes_per_day: int | None = None  # endurance budget
    second_hit_blocks: int = 0  # remembered first offers; 0 admits at once
    slots_per_file: int = SLOTS_PER_FILE


@dataclass(frozen=True, slots=True)
class Opened:
    """What was found at start."""

    blocks: int
    scanned: tuple[str, ...] = ()  # directories that had lost their names
    failed: dict[str, str] = field(default_factory=dict)  # directories that do not serve, and why


class SsdTier:
    """Thread-safe. ``open`` first, ``close`` last; in between, ``start`` for a thread of its own."""

    def __init__(
        self,
        directories: Sequence[DirectorySpec],
        *,
        payload_bytes: int,
        checksum: Checksum,
        policy: RetentionPolicy | None = None,
        settings: SsdSettings | None = None,
        clock: Clock | None = None,
        wall: Callable[[], float] = time.time,
        disk: Disk | None = None,
        metrics: SsdMetrics | None = None,
    ) -> None:
        """Args as in ``BlockGeometry`` and ``verify_block``; ``disk`` and ``wall`` are there for tests.

        Raises:
            ValueError: No directory, or one without room for a block.
        """
        if not directories:
            raise ValueError("an SSD tier needs a directory")
        self._settings = settings or SsdSettings()
        clock = clock or SystemClock()
        layout = RecordLayout(payload_bytes)
        self._disk = disk or SystemDisk()
        self._core = TierCore(
            layout=layout,
            policy=policy or RetentionPolicy(),
            clock=clock,
            time=TierTime(clock, wall=wall),
            inventory=Inventory([self._directory(spec, layout) for spec in directories]),
            queue=WriteBehind(self._settings.write_behind_blocks, layout),
            metrics=metrics or SsdMetrics.unregistered(),
        )
        self._intake = Intake(
            self._core,
            EnduranceBudget(self._settings.bytes_per_day, clock),
            SecondHit(self._settings.second_hit_blocks),
        )
        self.figures = Figures(self._core)
        self._reader, self._writer = Reader(self._core, checksum), Writer(self._core)
        self._keeper = Keeper(self._core)
        self._wake = threading.Condition(self._core.lock)
        self._thread: threading.Thread | None = None
        self._stopping = False

    @property
    def layout(self) -> RecordLayout:
        """Sizes of a record; pages of ``slot_bytes`` on page boundaries are read without a copy."""
        return self._core.layout

    # --- life ---

    def open(self) -> Opened:
        """Lock the directories, allocate them, find out what they hold. Call once.

        Raises:
            DirectoryOwned: One belongs to another store. WrongFormat: One was laid out otherwise.
            NoUsableDirectory: All failed. A few that fail are quarantined, the rest serve.
        """
        core, scanned, failed = self._core, [], {}
        for directory in core.inventory.directories:
            try:
                if not directory.open():
                    scanned.append(directory.folder)
            except OSError as error:
                directory.failed = failed[directory.folder] = f"open: {error}"
            except (DirectoryOwned, WrongFormat):
                self.abandon()
                raise
        if not core.inventory.serving():
            self.abandon()
            raise NoUsableDirectory(failed)
        self._set_time()
        core.inventory.load(core.time.now(), core.policy.last_use_step_s)
        for directory in core.inventory.serving():
            core.settle(directory)
            self._keeper.save_time(directory)
        return Opened(len(core.inventory), tuple(scanned), failed)

    def start(self) -> None:
        """Write and sweep in a thread from now on."""
        self._thread = threading.Thread(target=self._run, name="ssd-writer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Store what waits, note last uses, give the directories back."""
        self._stop_thread()
        self.flush()
        self._keeper.save_use()
        self.abandon()

    def abandon(self) -> None:
        """Give the directories back as they are. What waits is lost; that costs misses."""
        self._stop_thread()
        for directory in self._core.inventory.directories:
            directory.close()

    # --- in ---

    def try_put(self, put: BlockPut) -> Admission:
        """Offer a block; copies it and returns at once. Only ACCEPTED means that it will be stored.

        Raises:
            CorruptBlock, ValueError: The page has no valid header, or one of another size.
        """
        (answer,) = self._intake.offer_all([put], copy=True)
        with self._wake:
            if answer is Admission.ACCEPTED or answer in MAY_PASS:  # a sweep may help the next one
                self._wake.notify()
        return answer

    def put_batch(self, puts: Sequence[BlockPut]) -> list[Admission]:
        """Store blocks before returning, with as many batches and sweeps as it takes. Not for a step loop.

        Pages on page boundaries are written from where they are, without a copy; they must not change meanwhile.
        """
        answers: list[Admission] = []
        under_way: list[Portion] = []  # written while the next blocks are let in
        retried, run = -1, max(one.slots.run_slots for one in self._core.inventory.directories)
        with self._core.io_lock:
            try:
                while len(answers) < len(puts):
                    start = len(answers)
                    step = (
                        _RUNS_A_STEP * run if start else 2 * run
                    )  # the disk is not to wait long for the first ones
                    answers += self._intake.offer_all(puts[start : start + step], copy=False)
                    under_way += self._writer.begin(step)
                    if sum(len(portion.members) for portion in under_way) > _UNDER_WAY_BLOCKS:
                        older = under_way[: len(under_way) // 2]
                        del under_way[: len(older)]
                        self._writer.finish(older)
                    if answers[-1] in MAY_PASS:
                        if len(answers) > retried and self._make_room(answers[-1], under_way):
                            retried = len(answers)
                            answers.pop()
                        under_way = []
            finally:  # also when a page is no block: what was accepted before it is still written from its page
                self._writer.finish(under_way)
                self.flush()
        return answers

    def pump(self) -> int:
        """Store one batch of what waits; returns its size."""
        return self._writer.pump(self._settings.batch_blocks)

    def flush(self) -> None:
        """Store everything that was accepted before, names durable."""
        while self.pump():
            pass
        with self._core.io_lock:
            for directory in self._core.inventory.serving():
                self._core.write_names(directory, sync=True)

    # --- out ---

    def contains(self, block_hash: BlockHash) -> bool:
        """Whether a block is stored; what waits to be written is not, yet."""
        with self._core.lock:
            return self._core.inventory.holds(block_hash)

    def stored(self, hashes: Sequence[BlockHash], *, exact: bool = False) -> list[bool]:
        """Whether each block is stored, as an exact one if asked so."""
        with self._core.lock:
            return [self._core.inventory.holds(block_hash, exact=exact) for block_hash in hashes]

    def longest_prefix(self, hashes: Sequence[BlockHash], *, exact: bool = False) -> int:
        """How many blocks of a chain are stored from its beginning on; ``exact`` stops at the first tainted one."""
        with self._core.lock:
            for count, block_hash in enumerate(hashes):
                if not self._core.inventory.holds(block_hash, exact=exact):
                    return count
        return len(hashes)

    def get_batch(self, hashes: Sequence[BlockHash], pages: Sequence[Bytes]) -> list[BlockHeader | None]:
        """Read blocks into pages, every byte verified; ``None`` is a miss.

        Args:
            hashes: Any blocks. pages: As many buffers of at least ``layout.page_bytes`` bytes, contiguous and
                writable. After a hit a page holds payload, header (as in memory) and zeros; after a miss, anything.
        """
        if len(hashes) != len(pages) or any(page.nbytes < self.layout.page_bytes for page in pages):
            raise ValueError(
                f"{len(hashes)} blocks need as many pages of {self.layout.page_bytes} bytes or more"
            )
        found: list[BlockHeader | None] = []
        for start in range(0, len(hashes), PORTION):
            found += self._reader.get(hashes[start : start + PORTION], pages[start : start + PORTION])
        return found

    def drain_events(self) -> BlockEvents:
        """Blocks stored and gone since the last call; one reader."""
        with self._core.lock:
            return self._core.inventory.events.drain()

    def snapshot(self) -> tuple[int, tuple[BlockHash, ...]]:
        """Number of the next event, and every block stored before it."""
        with self._core.lock:
            return self._core.inventory.events.next_seq, self._core.inventory.hashes()

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """These blocks were used, wherever they were found: they stay for another ``floor_s``."""
        with self._core.lock:
            self._core.inventory.touch(hashes, self._core.time.now())

    # --- upkeep ---

    def sweep(self) -> int:
        """Make room as the watermarks and quotas ask; returns how many blocks went."""
        return self._keeper.sweep()

    def save_use(self) -> int:
        """Write last uses that the disk has too old; returns how many."""
        return self._keeper.save_use()

    def delete_tenant(self, tenant: bytes) -> int:
        """Delete all blocks of a tenant for good, traces included; returns how many were stored."""
        return self._keeper.delete("tenant", tenant)

    def delete_root(self, root: bytes) -> int:
        """Delete all blocks of a model, as named by its root; returns how many were stored."""
        return self._keeper.delete("root", root[:ID_BYTES])

    def check(self, *, deep: bool = False) -> None:
        """Recount: every slot in one state, memory as disk, space accounted for as allocated.

        ``deep`` reads the end of every live record, too.

        Raises:
            ConservationError: With every problem found.
        """
        core = self._core
        with core.io_lock, core.lock:
            problems = core.inventory.problems(core.queue.by_tenant())
            for directory in core.inventory.serving():
                problems += directory.disk_problems(deep=deep)
        if problems:
            raise ConservationError(problems)

    # --- within ---

    def _directory(self, spec: DirectorySpec, layout: RecordLayout) -> Directory:
        count, per_file = spec.capacity_bytes // layout.slot_bytes, self._settings.slots_per_file
        crew = crew_of(self._disk, self._settings.io_threads)
        return Directory(self._disk, spec.folder, layout, count, crew=crew, slots_per_file=per_file)

    def _make_room(self, answer: Admission, under_way: Sequence[Portion]) -> bool:
        """End what is under way and bring about what may let a refused block in; says whether anything was."""
        self._writer.finish(under_way)
        if answer is Admission.QUEUE_FULL:
            return bool(under_way) or self.pump() > 0
        self.flush()  # what waits cannot be evicted
        return self.sweep() > 0

    def _set_time(self) -> None:
        core = self._core
        saved = [d.table.saved_time for d in core.inventory.serving() if d.table.saved_time is not None]
        latest = core.inventory.latest_use()
        if saved or latest:
            core.time.resume(
                max(saved, default=None), latest_s=latest, max_downtime_s=core.policy.max_downtime_s
            )

    def _run(self) -> None:
        saved_at = self._core.clock.monotonic()
        while True:
            with self._wake:
                if not self._core.queue.waiting and not self._stopping:
                    self._wake.wait(_IDLE_S)
                if self._stopping:
                    return
            self.pump()
            self.sweep()
            if self._core.clock.monotonic() - saved_at >= _SAVE_USE_S:
                saved_at = self._core.clock.monotonic()
                self._keeper.save_use()

    def _stop_thread(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            with self._wake:
                self._stopping = True
                self._wake.notify()
            self._thread.join()
            self._thread = None
