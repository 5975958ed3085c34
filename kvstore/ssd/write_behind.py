"""Blocks that were accepted and are not stored yet: copies in a fixed number of buffers. Not thread-safe."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from epdserve.kvstore.ssd.directory import Directory
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.record import NAME_BYTES, NAME_DTYPE, RecordLayout
from epdserve.kvstore.ssd.slots import aligned
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash
from numpy.typing import NDArray

ID_BYTES = 16


@dataclass(
    slots=True, eq=False
)  # not frozen: to make one would take three times as long, and hundreds are made at once
class BlockPut:
    """A sealed block on its way in.

    ``page`` holds payload and header, whatever stands behind. ``tenant`` is 16 bytes that name a tenant (a digest,
    never its key); ``root`` the root of its chain, of which the first 16 bytes are kept. ``running``: a request that
    runs needs it, so it may take from the reserve.
    """

    page: Bytes
    parent: BlockHash | None
    tenant: bytes
    root: bytes
    running: bool = False

    def __post_init__(self) -> None:
        if len(self.tenant) != ID_BYTES or len(self.root) < ID_BYTES:
            raise ValueError(
                f"tenant has 16 bytes, root 16 or more; got {len(self.tenant)}, {len(self.root)}"
            )
        if self.parent is not None and len(self.parent) != BLOCK_HASH_BYTES:
            raise ValueError(f"parent must have {BLOCK_HASH_BYTES} bytes, got {len(self.parent)}")


@dataclass(slots=True, eq=False)
class Pending:
    """An accepted block: its buffer, and the slot it will have. Its name lies in the buffer."""

    block_hash: BlockHash
    tenant: bytes
    root: bytes
    reserve: bool
    directory: Directory
    slot: int
    buffer: int
    accepted_at: float
    page: Bytes | None = None  # where all but its end is, if it was not copied
    dropped: bool = False  # deleted before it was written


class WriteBehind:
    """A bounded queue. Memory is ``blocks`` buffers and nothing else, mapped once."""

    def __init__(self, blocks: int, layout: RecordLayout) -> None:
        if blocks <= 0:
            raise ValueError(f"write-behind needs room for a block, got {blocks}")
        whole = aligned(blocks, layout.slot_bytes)
        self.buffers = list(whole)
        self.end_rows: Final[Bytes] = whole[:, layout.end_offset :]  # (blocks, end_bytes)
        self.ends = list(self.end_rows)
        names = self.end_rows[:, layout.name_at : layout.name_at + NAME_BYTES]
        self.names: Final[NDArray[np.void]] = names.view(NAME_DTYPE)[:, 0]  # each in its buffer
        self.by_hash: dict[BlockHash, Pending] = {}
        self._free = deque(range(blocks))
        self._queue: deque[Pending] = deque()

    def __len__(self) -> int:
        return len(self.by_hash)

    @property
    def room(self) -> int:
        """Buffers that are left."""
        return len(self._free)

    @property
    def full(self) -> bool:
        """No buffer is left: the disk is slower than the arrivals."""
        return not self._free

    @property
    def waiting(self) -> int:
        """Blocks that can be written now."""
        return len(self._queue)

    def take_buffer(self) -> int:
        """A buffer to copy into; there is one."""
        return self._free.popleft()

    def take_buffers(self, count: int) -> list[int]:
        """``take_buffer`` of several; so many are left."""
        return [self._free.popleft() for _ in range(count)]

    def announce(self, pending: Pending) -> None:
        """The block is on its way: another copy of it need not come."""
        self.by_hash[pending.block_hash] = pending

    def enqueue(self, arrived: Sequence[Pending]) -> None:
        """Their bytes are here."""
        self._queue.extend(arrived)

    def batch(self, limit: int) -> list[Pending]:
        """The oldest blocks that can be written."""
        return [self._queue.popleft() for _ in range(min(limit, len(self._queue)))]

    def done(self, over: Sequence[Pending]) -> None:
        """Stored or given up: their buffers are free."""
        for pending in over:
            if self.by_hash.get(pending.block_hash) is pending:
                del self.by_hash[pending.block_hash]
        self._free.extend([pending.buffer for pending in over])

    def by_tenant(self) -> Counter[bytes]:
        """Accepted blocks by tenant."""
        return Counter(pending.tenant for pending in self.by_hash.values())

    def oldest_s(self, now: float) -> float:
        """How long the oldest block waits."""
        return max((now - pending.accepted_at for pending in self.by_hash.values()), default=0.0)
