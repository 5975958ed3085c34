"""What workers and the store of their machine say to each other. Frozen values, no behaviour.

Hashes, parents, roots and tenants are plain bytes, as everywhere in ``services.types``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from epdserve.services.types import BlockRef, TailRef, TokenIds

HASH_BYTES: Final = 16  # of a block's hash, a tail's identity, a tenant's label
BLOCKS: Final = "blocks"  # regions of a store's memory
TAILS: Final = "tails"


class CacheTier(StrEnum):
    """Where a store found what it lends."""

    HOST = "host"
    SSD = "ssd"
    PEER = "peer"


class OffloadResult(StrEnum):
    """What became of a block or tail that a worker offered."""

    TAKEN = "taken"
    HELD = "held"  # it was there already
    REFUSED = "refused"  # no room, too much under way, or not the bytes that were promised


@dataclass(frozen=True, slots=True)
class CacheOwner:
    """Whose bytes these are: for quotas and deletion. Hashes tell tenants and models apart by themselves.

    Attributes:
        tenant: 16 bytes, a digest of the tenant's key (``kvstore.hashing.tenant_label``).
        root: Of the hash chain, 16 bytes or more.
    """

    tenant: bytes
    root: bytes

    def __post_init__(self) -> None:
        if len(self.tenant) != HASH_BYTES or len(self.root) < HASH_BYTES:
            raise ValueError(
                f"an owner has a tenant of 16 bytes and a root of 16 or more, got {len(self.tenant)} and "
                f"{len(self.root)}"
            )


@dataclass(frozen=True, slots=True)
class OffloadBlock:
    """A sealed block in a worker's region ``pages``; ``parent`` is the block before it, None for a first one."""

    ref: BlockRef
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class OffloadRequest:
    """Blocks that a worker offers. It keeps their pages as they are until the answer, or the deadline, has come.

    Attributes:
        incarnation: Of the worker; another life of it has other pages.
        running: Of a request that runs: they may take from the SSD tier's reserve.
    """

    worker: str
    incarnation: str
    owner: CacheOwner
    blocks: tuple[OffloadBlock, ...]
    running: bool = False


@dataclass(frozen=True, slots=True)
class TierRun:
    """So many blocks of a chain, one after the other, are found in a tier."""

    tier: CacheTier
    blocks: int


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A chain that a worker wants to read.

    Attributes:
        hashes: Blocks that follow one another, the first one after ``parent`` (None: it begins the chain).
        exact: Stop at the first tainted block.
        max_blocks: 0 is all of them. What a fetch lends is pinned: long chains are better read in parts.
        local_only: Ask no peers.
        max_wait_s: End in good order where the next block has not come this long after the call began; 0 is never.
    """

    owner: CacheOwner
    hashes: tuple[bytes, ...]
    parent: bytes | None = None
    exact: bool = False
    max_blocks: int = 0
    local_only: bool = False
    max_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """A block in the store's region ``blocks``: ``ref.page`` is its slot."""

    ref: BlockRef
    tier: CacheTier


@dataclass(frozen=True, slots=True)
class FetchBatch:
    """The next blocks of a chain; all batches of a fetch are under one lease."""

    lease: str
    incarnation: str
    blocks: tuple[FetchedBlock, ...]


@dataclass(frozen=True, slots=True)
class TailOffer:
    """A tail that a worker offers from its region ``tails``; the slot stays as it is until the answer.

    Attributes:
        identity: 16 bytes, as in the record's header.
        parent: Hash of the last full block; without one a name of the chain's beginning
            (``kvstore.hashing.chain_start``).
        after_tokens: Tokens after that block, 0 or more.
        rest: 16 bytes, ``kvstore.tails.rest_digest`` of those tokens.
    """

    worker: str
    incarnation: str
    owner: CacheOwner
    tail: TailRef
    identity: bytes
    parent: bytes
    after_tokens: int
    rest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class TailCandidate:
    """A place in a prompt where a tail may continue from: the hash of a full block and the tokens that follow it.

    A tail covers some of ``after``, from its beginning on: none, one, or all of them. At most one block's worth.
    """

    parent: bytes
    after: TokenIds

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TailCandidate):
            return NotImplemented
        return self.parent == other.parent and self.after.tolist() == other.after.tolist()

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class TailQuery:
    """Which tail would continue this prompt? ``candidates`` are told deepest first: the first that has one wins."""

    owner: CacheOwner
    candidates: tuple[TailCandidate, ...]
    exact: bool = False
    local_only: bool = False


@dataclass(frozen=True, slots=True)
class FoundTail:
    """A tail in the store's region ``tails``, lent under a lease.

    Attributes:
        candidate: Index of the candidate that it fits.
        after_tokens: How many of that candidate's tokens it covers.
        tier: HOST, or PEER if it was pulled from another machine's store for this call.
    """

    lease: str
    incarnation: str
    tail: TailRef
    identity: bytes
    candidate: int
    after_tokens: int
    tier: CacheTier


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a store has deleted."""

    host_blocks: int
    ssd_blocks: int
    tails: int
