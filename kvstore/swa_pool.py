"""Tails of conversations that may go on: records of one size in host memory, with minutes to live.

Expired means missing, collected or not. All tails live equally long, so the oldest is the one that expires next: one
order serves both. Thread-safe: one lock for names and owners; copies and checksums run outside it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.block_header import Checksum
from epdserve.kvstore.clock import Clock, SystemClock
from epdserve.kvstore.errors import ConservationError, CorruptBlock
from epdserve.kvstore.host_metrics import SwaPoolMetrics
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import Bytes, StagingPool
from epdserve.kvstore.tail_index import TailIndex
from epdserve.kvstore.tails import Tail, TailId, TailInfo
from epdserve.kvstore.types import BlockOwner, LeaseId


class SwaPool:
    """Finds, keeps and evicts tails in the slots of one pool, which nobody else takes slots from."""

    def __init__(
        self,
        slots: StagingPool,
        *,
        payload_bytes: int,
        ttl_s: float,
        clock: Clock | None = None,
        leases: LeaseTable | None = None,
        metrics: SwaPoolMetrics | None = None,
    ) -> None:
        """Begin empty.

        Args:
            slots: Of one tail each.
            payload_bytes: Leading bytes of a record that its checksum covers.
            ttl_s: Time from sealing to expiry; the directory's entries live no longer.
            clock: Of expiry.
            leases: Of tails lent to peers; whoever owns the table ends and expires them.
            metrics: Counters.
        """
        if ttl_s <= 0 or not 0 < payload_bytes <= slots.slot_bytes:
            raise ValueError(f"impossible tails: ttl_s={ttl_s}, {payload_bytes} bytes in {slots.slot_bytes}")
        self.ttl_s = ttl_s
        self._slots = slots
        self._payload_bytes = payload_bytes
        self._clock = clock or SystemClock()
        self._leases = leases or LeaseTable(self._clock)
        self._metrics = metrics or SwaPoolMetrics.unregistered()
        self._lock = threading.Lock()
        self._tails: OrderedDict[TailId, Tail] = OrderedDict()  # oldest first
        self._places = TailIndex()
        self._leaving: set[int] = set()  # slots out of ``_tails`` that readers still look at
        self._filling: set[Slot] = set()
        self._quarantined: set[Slot] = set()

    # -- in -------------------------------------------------------------------------------------------------

    def put(self, record: Bytes, info: TailInfo, *, checksum: Checksum | None = None) -> bool:
        """Copy a tail in; False when every slot is pinned or being filled.

        Args:
            record: (slot_bytes,) uint8. May change meanwhile; what is kept is verified.
            info: What the record has to be.
            checksum: Verifies the copy; without it nothing does.

        Raises:
            CorruptBlock: The record is something else. Nothing is kept.
            ValueError: A record of another size.
        """
        if record.shape != (self._slots.slot_bytes,):
            raise ValueError(f"a record has {self._slots.slot_bytes} bytes, got {record.shape}")
        slot = self.reserve()
        if slot is None:
            return False
        np.copyto(self._slots.bytes_of(slot), record)
        self.seal(slot, info, checksum=checksum)
        return True

    def reserve(self) -> Slot | None:
        """A slot to fill in place: an expired tail's, a free one, or else the oldest tail's that nobody reads.

        Ends with ``seal``, ``abort`` or ``quarantine``. The bytes are ``StagingPool.bytes_of``.
        """
        with self._lock:
            now = self._clock.monotonic()
            self._collect(now)
            slot = self._slots.acquire()
            if slot is None:
                oldest = next((tail for tail in self._tails.values() if not tail.pins), None)
                if oldest is not None:
                    self._forget(oldest, "space")
                    self._metrics.ages.observe(now - oldest.stored_at)
                    slot = self._slots.acquire()
            if slot is not None:
                self._filling.add(slot)
        if slot is None:
            self._metrics.put_refused.inc()
        return slot

    def seal(self, slot: Slot, info: TailInfo, *, checksum: Checksum | None = None) -> None:
        """Let a filled slot be found for ``ttl_s`` from now.

        Of two records of one identity the first stays, with its time renewed, and the other slot is freed; only an
        exact one replaces a tainted one.

        Raises:
            CorruptBlock: The slot holds something else. The slot is free again.
        """
        try:
            self._verify(slot, info, checksum)
        except BaseException:
            self.abort(slot)
            raise
        with self._lock:
            self._filling.remove(slot)
            now = self._clock.monotonic()
            self._collect(now)
            held = self._tails.get(info.identity)
            if held is not None and (held.info.exact or not info.exact):
                self._slots.release(slot)
                held.stored_at = now
                self._tails.move_to_end(info.identity)
                self._metrics.put_again.inc()
                return
            if held is not None:
                self._forget(held, "replaced_by_exact")
            self._tails[info.identity] = Tail(info, slot, now)
            if info.place is not None:
                self._places.add(info.identity, info.place)
        self._metrics.put_new.inc()

    def abort(self, slot: Slot) -> None:
        """Free a slot that was being filled."""
        with self._lock:
            self._filling.remove(slot)
            self._slots.release(slot)

    def quarantine(self, slot: Slot) -> None:
        """Set apart a slot that was being filled by a transfer of unknown state."""
        with self._lock:
            self._filling.remove(slot)
            self._slots.quarantine(slot)
            self._quarantined.add(slot)

    def transfer_over(self, slot: Slot) -> None:
        """Free a quarantined slot: its transfer is known to be over, or its agent closed."""
        with self._lock:
            self._quarantined.remove(slot)
            self._slots.transfer_over(slot)

    # -- out ------------------------------------------------------------------------------------------------

    def get(self, identity: TailId, *, exact: bool = False) -> PinnedTail | None:
        """A tail, pinned until its ``release``; None is a miss. With ``exact`` a tainted one is none."""
        with self._lock:
            tail = self._tails.get(identity)
            if tail is None or (exact and not tail.info.exact):
                self._metrics.miss.inc()
                return None
            if self._expired(tail, self._clock.monotonic()):
                self._metrics.expired.inc()
                return None
            tail.pins += 1
        self._metrics.hit.inc()
        return PinnedTail(self, tail, self._slots.readable(tail.slot))

    def longest(
        self, parent: bytes, after: npt.NDArray[np.integer], *, exact: bool = False
    ) -> TailInfo | None:
        """The longest tail that continues a prompt with the tokens ``after`` behind ``parent``.

        Pins nothing and counts nothing. With ``exact`` only exact ones are looked at.
        """
        with self._lock:
            now = self._clock.monotonic()
            for identity, _ in self._places.fitting(parent, after):
                tail = self._tails[identity]
                if not self._expired(tail, now) and (tail.info.exact or not exact):
                    return tail.info
        return None

    def lend(self, identity: TailId, lease_s: float, *, exact: bool = False) -> TailLoan | None:
        """Promise a peer that a tail stays where it is for ``lease_s`` seconds; None is a miss."""
        tail = self.get(identity, exact=exact)
        if tail is None:
            return None
        info, slot = tail.info, tail.slot
        try:
            return TailLoan(self._leases.grant(lease_s, tail.release), info, slot)
        except ValueError:
            tail.release()
            raise

    def release(self, tail: PinnedTail) -> None:
        """End a pin, once."""
        with self._lock:
            held = tail.end()
            held.pins -= 1
            if not held.pins and held.slot.index in self._leaving:
                self._leaving.remove(held.slot.index)
                self._slots.release(held.slot)

    def expire(self) -> int:
        """Free the slots of expired tails; returns how many. For gauges and directories: nothing depends on it."""
        with self._lock:
            return self._collect(self._clock.monotonic())

    def delete_owned(self, condemned: Callable[[BlockOwner], bool]) -> list[TailInfo]:
        """``delete`` for all tails whose owner is condemned; returns what was held."""
        with self._lock:
            held = [
                tail
                for tail in self._tails.values()
                if tail.info.owner is not None and condemned(tail.info.owner)
            ]
            for tail in held:
                self._forget(tail, "deleted")
        return [tail.info for tail in held]

    def delete(self, identities: Iterable[TailId]) -> int:
        """Forget tails at once, pinned ones too (their readers keep the bytes); returns how many were held."""
        with self._lock:
            held = [tail for identity in identities if (tail := self._tails.get(identity)) is not None]
            for tail in held:
                self._forget(tail, "deleted")
        return len(held)

    # -- about ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(1 for _ in self.held())

    def held(self) -> list[tuple[TailInfo, float]]:
        """Every tail that can be found, oldest first, and the seconds each has left: what a directory should say."""
        with self._lock:
            now = self._clock.monotonic()
            return [
                (tail.info, tail.stored_at + self.ttl_s - now)
                for tail in self._tails.values()
                if not self._expired(tail, now)
            ]

    def held_bytes(self) -> int:
        """Bytes of the tails that can be found."""
        return len(self) * self._slots.slot_bytes

    def pinned(self) -> int:
        """Tails that are being read, expired and deleted ones among them."""
        with self._lock:
            return sum(tail.pins > 0 for tail in self._tails.values()) + len(self._leaving)

    def check(self) -> None:
        """Recount.

        Raises:
            ConservationError: Slots, pins or order do not add up.
        """
        self._slots.check()
        with self._lock:
            counts = self._slots.counts()
            known = len(self._tails) + len(self._leaving) + len(self._filling)
            problems = []
            if counts.held != known or counts.quarantined != len(self._quarantined):
                problems.append(
                    f"{counts} of slots, {known} held and {len(self._quarantined)} quarantined here"
                )
            times = [tail.stored_at for tail in self._tails.values()]
            if len(self._places) != sum(tail.info.place is not None for tail in self._tails.values()):
                problems.append("tails and their places differ")
            if times != sorted(times) or any(tail.pins < 0 for tail in self._tails.values()):
                problems.append("tails are out of order, or released more often than pinned")
        if problems:
            raise ConservationError(problems)

    def _verify(self, slot: Slot, info: TailInfo, checksum: Checksum | None) -> None:
        payload = self._slots.bytes_of(slot).data[: self._payload_bytes]
        if checksum is not None and (found := checksum(payload, info.identity)) != info.checksum:
            raise CorruptBlock(info.identity, field="payload", found=found, wanted=info.checksum)

    # -- under the lock -------------------------------------------------------------------------------------

    def _expired(self, tail: Tail, now: float) -> bool:
        return now >= tail.stored_at + self.ttl_s

    def _collect(self, now: float) -> int:
        count = 0
        while self._tails and self._expired(tail := next(iter(self._tails.values())), now):
            self._forget(tail, "expired")
            count += 1
        return count

    def _forget(self, tail: Tail, reason: str) -> None:
        del self._tails[tail.info.identity]
        if tail.info.place is not None:
            self._places.discard(tail.info.identity, tail.info.place)
        self._metrics.evicted[reason].inc()
        if tail.pins:
            self._leaving.add(tail.slot.index)
        else:
            self._slots.release(tail.slot)


class PinnedTail:
    """A tail whose bytes stay until ``release``. For one thread at a time; a context manager."""

    __slots__ = ("_pool", "_tail", "record")

    def __init__(self, pool: SwaPool, tail: Tail, record: Bytes) -> None:
        self._pool = pool
        self._tail: Tail | None = tail
        self.record = record
        """(slot_bytes,) uint8; read-only."""

    @property
    def info(self) -> TailInfo:
        """What it is."""
        return self._held().info

    @property
    def slot(self) -> Slot:
        """Where it lies."""
        return self._held().slot

    def release(self) -> None:
        """Let go.

        Raises:
            ValueError: Released already.
        """
        self._pool.release(self)

    def end(self) -> Tail:
        """For the pool: the tail, once."""
        tail = self._held()
        self._tail = None
        return tail

    def _held(self) -> Tail:
        if self._tail is None:
            raise ValueError("this tail was released already")
        return self._tail

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class TailLoan:
    """What a peer needs to read a tail, and to say afterwards that it has."""

    lease: LeaseId
    info: TailInfo
    slot: Slot
