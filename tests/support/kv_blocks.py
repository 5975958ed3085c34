"""Valid blocks of random bytes, for tests that move them."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.types import BlockHash, MemoryRegion
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
PADDING_BYTES = 64


def toy_checksum(payload: memoryview, block_hash: bytes) -> int:
    """Stands for the kernel that serving uses."""
    return int.from_bytes(blake2b(payload, digest_size=8, key=block_hash).digest(), "little")


def block(seed: int, page_bytes: int) -> tuple[BlockHeader, Bytes]:
    """A valid block of random bytes: its header, and the page that holds it."""
    payload_bytes = page_bytes - HEADER_BYTES - PADDING_BYTES
    page = np.frombuffer(np.random.default_rng(seed).bytes(page_bytes), np.uint8).copy()
    block_hash = BlockHash(seed.to_bytes(16, "little"))
    checksum = toy_checksum(page[:payload_bytes].data, block_hash)
    header = BlockHeader(block_hash, checksum, payload_bytes, exact=True)
    page[payload_bytes : payload_bytes + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
    return header, page


def region(name: str, pages: Bytes) -> MemoryRegion:
    """The region of a (count, bytes) array, which must outlive its transfer."""
    return MemoryRegion(name, pages.ctypes.data, pages.shape[1], pages.shape[0])
