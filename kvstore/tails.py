"""Names and facts of tails, the records that resume a conversation exactly. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NewType

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import BlockOwner

TailId = NewType("TailId", bytes)  # 16 bytes: hash of the prefix's last full block and of the tokens after it
TAIL_ID_BYTES: Final = 16


def rest_digest(after: npt.NDArray[np.integer]) -> bytes:
    """16 bytes over the tokens that a tail covers beyond its last full block, whose hash holds the tenant's key."""
    rest = blake2b(digest_size=TAIL_ID_BYTES, person=b"epdserve-rest")
    rest.update(np.ascontiguousarray(after, dtype="<u4").data)
    return rest.digest()


@dataclass(frozen=True, slots=True)
class TailPlace:
    """Where a tail continues: so many tokens after a full block. What somebody with a longer prompt can look up.

    ``parent`` is the hash of that block, or ``hashing.chain_start`` before the first one; ``rest`` is
    ``rest_digest`` of the tokens after it.
    """

    parent: bytes
    after_tokens: int
    rest: bytes

    def __post_init__(self) -> None:
        if len(self.parent) != TAIL_ID_BYTES or len(self.rest) != TAIL_ID_BYTES or self.after_tokens < 0:
            raise ValueError(f"impossible place of a tail: {self!r}")


@dataclass(frozen=True, slots=True)
class TailInfo:
    """What a store says of a tail it holds.

    ``checksum`` covers the record's payload, seeded with length and identity, as a block's does. ``exact``: no encoder
    replay upstream. Without a ``place`` a tail is found by its identity only.
    """

    identity: TailId
    checksum: int
    exact: bool
    place: TailPlace | None = None
    owner: BlockOwner | None = None

    def __post_init__(self) -> None:
        if len(self.identity) != TAIL_ID_BYTES or not 0 <= self.checksum < 2**64:
            raise ValueError(f"impossible tail: {self.identity.hex()}, checksum {self.checksum}")


@dataclass(slots=True, eq=False)
class Tail:
    """A tail of the pool and how many read it; owned by the pool, under its lock."""

    info: TailInfo
    slot: Slot
    stored_at: float
    pins: int = 0


@dataclass(frozen=True, slots=True)
class TailLocation:
    """Where a tail was, the last time somebody said so."""

    store: str  # name of the store in the registry
    incarnation: str
    nbytes: int
    exact: bool


@dataclass(frozen=True, slots=True)
class TailEntry:
    """What a directory knows of a tail."""

    identity: TailId
    place: TailPlace
    location: TailLocation
