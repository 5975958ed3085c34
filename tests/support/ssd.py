"""Small blocks, tiers and broken disks for tests of the SSD tier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.ssd.disk import Bytes
from epdserve.kvstore.ssd.slots import aligned
from epdserve.kvstore.ssd.tier import DirectorySpec, SsdSettings, SsdTier
from epdserve.kvstore.ssd.write_behind import BlockPut
from epdserve.kvstore.types import BlockHash
from support.kv_blocks import toy_checksum
from support.manual_clock import ManualClock

PAYLOAD = 3800  # header and name stand in the first page as well: a slot is 4096 bytes
SLOT = 4096
TENANT, OTHER = b"tenant a" * 2, b"tenant b" * 2
ROOT, OTHER_ROOT = b"root one" * 4, b"root two" * 4


def name(number: int | str) -> BlockHash:
    return BlockHash(str(number).encode().ljust(16, b"."))


def page_of(block_hash: BlockHash, *, exact: bool = True, version: int = 0) -> Bytes:
    """A page of a block; ``version`` gives another one of the same name."""
    rng = np.random.default_rng([version, *block_hash])
    page = np.zeros(SLOT, np.uint8)
    page[:PAYLOAD] = np.frombuffer(rng.bytes(PAYLOAD), np.uint8)
    header = BlockHeader(block_hash, toy_checksum(page[:PAYLOAD].data, block_hash), PAYLOAD, exact)
    page[PAYLOAD : PAYLOAD + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
    return page


def put_of(
    block_hash: BlockHash,
    *,
    parent: BlockHash | None = None,
    tenant: bytes = TENANT,
    root: bytes = ROOT,
    running: bool = False,
    exact: bool = True,
    version: int = 0,
) -> BlockPut:
    return BlockPut(page_of(block_hash, exact=exact, version=version), parent, tenant, root, running)


def make_tier(
    folders: Sequence[Any],
    *,
    slots: int = 8,
    threads: int = 0,
    clock: ManualClock | None = None,
    wall: float = 1_000_000.0,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> SsdTier:
    """A tier whose directories have ``slots`` slots each; everything happens in the caller's thread."""
    defaults: dict[str, Any] = {"write_behind_blocks": 8, "batch_blocks": 4, "slots_per_file": 5}
    return SsdTier(
        [DirectorySpec(str(folder), slots * SLOT) for folder in folders],
        payload_bytes=PAYLOAD,
        checksum=toy_checksum,
        settings=SsdSettings(**{**defaults, **(settings or {}), "io_threads": threads}),
        clock=clock or ManualClock(),
        wall=lambda: wall,
        **more,
    )


def read(tier: SsdTier, hashes: Sequence[BlockHash], *, direct: bool = True) -> list[Bytes | None]:
    """Pages as they were put, or None for a miss."""
    pages = (
        aligned(len(hashes), SLOT) if direct else np.zeros((len(hashes), PAYLOAD + HEADER_BYTES), np.uint8)
    )
    found = tier.get_batch(hashes, list(pages))
    return [page if header is not None else None for page, header in zip(pages, found, strict=True)]


def same(page: Bytes | None, block_hash: BlockHash, **how: Any) -> bool:
    """Whether this is exactly the block's page."""
    return page is not None and np.array_equal(page, page_of(block_hash, **how)[: len(page)])
