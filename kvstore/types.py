"""Ids, sizes and small records of the KV store. Pure values: no locks, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, NewType

BlockHash = NewType("BlockHash", bytes)  # 16 bytes; a distinct type so a tenant key cannot slip in
PageId = NewType("PageId", int)  # 0 .. num_pages - 1: a block's place on its device
LeaseId = NewType("LeaseId", str)
PeerId = NewType("PeerId", str)  # one incarnation of a peer, given out by ``Transfer.connect``

BLOCK_HASH_BYTES: Final = 16
HOST_MEMORY: Final = -1  # ``device_id`` of host memory; 0 and up are accelerators


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Sizes of one KV block. The store moves these bytes and never looks inside."""

    tokens: int
    payload_bytes: int
    page_bytes: int  # payload, header, padding

    def __post_init__(self) -> None:
        if self.tokens <= 0 or not 0 < self.payload_bytes < self.page_bytes:
            raise ValueError(
                f"impossible block geometry: tokens={self.tokens}, payload_bytes={self.payload_bytes}, "
                f"page_bytes={self.page_bytes}"
            )


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """An array of ``count`` equal places that starts at ``address`` in some process.

    Place ``i`` begins at ``address + i * stride``. ``device_id`` is ``HOST_MEMORY`` or an accelerator's
    number.
    """

    name: str
    address: int
    stride: int
    count: int
    device_id: int = HOST_MEMORY

    def __post_init__(self) -> None:
        if not self.name or self.address <= 0 or self.stride <= 0 or self.count <= 0:
            raise ValueError(f"impossible memory region: {self!r}")
        if self.device_id < HOST_MEMORY:
            raise ValueError(f"device_id is {HOST_MEMORY} for host memory or a device number: {self!r}")

    @property
    def nbytes(self) -> int:
        """Size of the whole region."""
        return self.stride * self.count


@dataclass(frozen=True, slots=True)
class MemoryRegion(RegionDescriptor):
    """A region of *this* process.

    Whoever registers it keeps the memory alive until the transfer is closed.
    """

    def descriptor(self) -> RegionDescriptor:
        """What a peer may know of the region."""
        return RegionDescriptor(self.name, self.address, self.stride, self.count, self.device_id)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How a peer is reached and which regions it offers. Travels by gRPC.

    ``agent`` is the peer's name, the same over its restarts. ``metadata`` is opaque and differs between
    restarts.
    """

    agent: str
    metadata: bytes
    regions: tuple[RegionDescriptor, ...]


class BlockInfo(NamedTuple):  # a tuple, as hundreds are made for one hand-off
    """What a handle says of a sealed page.

    ``generation`` counts the page's owners; it is never stored in the page.
    """

    page: PageId
    generation: int
    block_hash: BlockHash
    checksum: int
    exact: bool


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """Whose bytes these are: 16 bytes that name a tenant, and the root of the chain. For quotas and deletion."""

    tenant: bytes
    root: bytes


@dataclass(frozen=True, slots=True)
class Conservation:
    """Pages by phase. ``free + filling + sealed + cached + quarantined == total`` always."""

    free: int
    filling: int
    sealed: int
    cached: int
    quarantined: int
    total: int

    @property
    def missing(self) -> int:
        """Pages in no phase; anything but 0 is a bug."""
        return self.total - (self.free + self.filling + self.sealed + self.cached + self.quarantined)


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """A batch of changes to the set of blocks a worker holds.

    Events are numbered; this batch covers ``first_seq .. next_seq - 1``. A reader that expected a number
    below ``first_seq`` has lost events and needs a snapshot. Only the last change of each hash is told, so a
    batch may remove a hash the reader never saw.
    """

    first_seq: int
    added: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()

    @property
    def next_seq(self) -> int:
        """Number of the first event after this batch."""
        return self.first_seq + len(self.added) + len(self.removed)
