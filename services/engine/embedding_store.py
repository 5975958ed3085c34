"""Embeddings of images in host memory, where peers can read them: a cache by image digest.

One arena of equal slots, ``SPAN_ROWS`` embeddings each, so that a small image takes no more than it needs. What is lent
or was asked for and not yet fetched stays; of the rest the image used longest ago goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from epdserve.kernels.checksum import page_checksums_host
from epdserve.kvstore.clock import Clock
from epdserve.kvstore.errors import ConservationError
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.staging import PAGE_BYTES, Bytes, StagingPool
from epdserve.services.engine.image_metrics import EmbeddingMetrics
from epdserve.services.image_types import EMBEDDINGS, SPAN_ROWS

_VALUE_BYTES: Final = 2  # bfloat16


@dataclass(slots=True, eq=False)
class Held:
    """Embeddings of one image.

    Attributes:
        checksums: Of the used bytes of each slot.
        kept_until: Not evicted before, so that whoever asked for it can fetch it.
    """

    slots: tuple[Slot, ...]
    tokens: int
    checksums: tuple[int, ...]
    kept_until: float
    pins: int = 0


class EmbeddingStore:
    """Thread-safe.

    Args:
        hidden: Width of an embedding.
        nbytes: Of the arena; holds at least one image of ``max_tokens``.
        keep_s: How long an image stays for whoever asked for it.

    Raises:
        ValueError: ``nbytes`` holds no image of ``max_tokens``.
        OSError: The machine does not give that much memory.
    """

    def __init__(
        self,
        *,
        hidden: int,
        nbytes: int,
        max_tokens: int,
        keep_s: float,
        clock: Clock,
        metrics: EmbeddingMetrics,
    ) -> None:
        self._row_bytes = hidden * _VALUE_BYTES
        self._hidden, self._keep_s, self._clock, self._metrics = hidden, keep_s, clock, metrics
        slot_bytes = -(-SPAN_ROWS * self._row_bytes // PAGE_BYTES) * PAGE_BYTES
        if nbytes // slot_bytes < -(-max_tokens // SPAN_ROWS):
            raise ValueError(f"{nbytes} bytes hold no image of {max_tokens} embeddings of {hidden} values")
        self.pool = StagingPool(EMBEDDINGS, slot_bytes=slot_bytes, count=nbytes // slot_bytes)
        self._lock = threading.Lock()
        self._held: OrderedDict[bytes, Held] = OrderedDict()  # used longest ago first

    def touch(self, digest: bytes) -> bool:
        """Whether an image is here; it then stays for whoever asked."""
        with self._lock:
            held = self._held.get(digest)
            if held is None:
                return False
            self._keep(digest, held)
            return True

    def put(self, digest: bytes, embeddings_ND: torch.Tensor) -> bool:
        """Store (tokens, hidden) embeddings as bfloat16; False if everything here is in use.

        Whole or not at all; an image that is here already only counts as used.
        """
        rows_NB = _as_bytes(embeddings_ND)
        with self._lock:
            if (held := self._held.get(digest)) is not None:
                self._keep(digest, held)
                return True
            slots = self._acquire(-(-len(rows_NB) // SPAN_ROWS))
        if slots is None:
            return False
        checksums = self._write(slots, rows_NB, digest)
        fresh = Held(slots, len(rows_NB), checksums, self._clock.monotonic() + self._keep_s)
        with self._lock:
            if digest in self._held:  # another thread was faster
                self._release(slots)
            else:
                self._held[digest] = fresh
        return True

    def pin(self, digest: bytes, tokens: int) -> Held | None:
        """Keep an image where it is until ``unpin``; None if it is not here, or has another length."""
        with self._lock:
            held = self._held.get(digest)
            if held is None or held.tokens != tokens:
                return None
            held.pins += 1
            self._held.move_to_end(digest)
            return held

    def unpin(self, held: Held) -> None:
        """End one ``pin``."""
        with self._lock:
            held.pins -= 1
            held.kept_until = 0.0

    def read(self, held: Held) -> torch.Tensor:
        """(tokens, hidden) bfloat16 of a pinned image: a copy."""
        return gather_rows(self.pool, held.slots, held.tokens, self._hidden)

    def used_bytes(self, index: int, tokens: int) -> int:
        """Bytes that rows take in the slot number ``index`` of an image."""
        return min(SPAN_ROWS, tokens - index * SPAN_ROWS) * self._row_bytes

    def held_bytes(self) -> int:
        """Bytes of slots that hold images."""
        return self.pool.counts().held * self.pool.slot_bytes

    def pinned(self) -> int:
        """Images that are being read."""
        with self._lock:
            return sum(held.pins > 0 for held in self._held.values())

    def check(self) -> None:
        """Recount.

        Raises:
            ConservationError: A slot is held by no image.
        """
        with self._lock:
            owned = sum(len(held.slots) for held in self._held.values())
            counts = self.pool.counts()
        if owned != counts.held:
            raise ConservationError([f"{counts.held} slots are held, images own {owned}"])

    def _keep(self, digest: bytes, held: Held) -> None:
        self._held.move_to_end(digest)
        held.kept_until = self._clock.monotonic() + self._keep_s

    def _acquire(self, count: int) -> tuple[Slot, ...] | None:
        """Slots for an image, by eviction if need be; None, and no change, if what is in use leaves no room."""
        now = self._clock.monotonic()
        victims, room = [], self.pool.counts().free
        for digest, held in self._held.items():
            if room >= count:
                break
            if not held.pins and held.kept_until <= now:
                victims.append(digest)
                room += len(held.slots)
        if room < count:
            self._metrics.refused.inc()
            return None
        for digest in victims:
            self._release(self._held.pop(digest).slots)
            self._metrics.evictions.inc()
        slots = [self.pool.acquire() for _ in range(count)]
        assert all(slot is not None for slot in slots)
        return tuple(slot for slot in slots if slot is not None)

    def _release(self, slots: tuple[Slot, ...]) -> None:
        for slot in slots:
            self.pool.release(slot)

    def _write(self, slots: tuple[Slot, ...], rows_NB: Bytes, digest: bytes) -> tuple[int, ...]:
        checksums = []
        for index, slot in enumerate(slots):
            part = rows_NB[index * SPAN_ROWS : (index + 1) * SPAN_ROWS].reshape(-1)
            place = self.pool.bytes_of(slot)
            place[: len(part)] = part
            checksums.append(slot_checksum(place, len(part), digest))
        return tuple(checksums)


def slot_checksum(place: Bytes, nbytes: int, digest: bytes) -> int:
    """Checksum of the first bytes of a slot, seeded with the image it belongs to."""
    return page_checksums_host(place[None], [0], nbytes, [digest[:16]])[0]


def gather_rows(pool: StagingPool, slots: tuple[Slot, ...], tokens: int, hidden: int) -> torch.Tensor:
    """(tokens, hidden) bfloat16 out of slots: a copy."""
    row_bytes = hidden * _VALUE_BYTES
    rows_NB = np.empty((tokens, row_bytes), np.uint8)
    for index, slot in enumerate(slots):
        part = rows_NB[index * SPAN_ROWS : (index + 1) * SPAN_ROWS].reshape(-1)
        part[:] = pool.bytes_of(slot)[: part.size]
    return torch.from_numpy(rows_NB).view(torch.bfloat16)


def _as_bytes(embeddings_ND: torch.Tensor) -> Bytes:
    rows: Bytes = embeddings_ND.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return rows
