"""Names of blocks: a chain of keyed hashes over everything that decides a block's bytes.

``hash[i] = H_key(hash[i-1], tokens of block i, images in block i)``. The key is the tenant's, so tenants can
neither share nor probe each other's blocks. The root holds weights, layout, number formats and back end, so
that no change of them can hit old bytes. Fields have fixed sizes or carry their length: two different inputs
never spell the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash

CHAIN_VERSION: Final = 1
IMAGE_DIGEST_BYTES: Final = 32
TENANT_LABEL_BYTES: Final = 16
_MAX_KEY_BYTES: Final = 64  # blake2b's limit
_MAX_TOKEN: Final = 2**32 - 1

TokenIds = npt.NDArray[np.integer] | Sequence[int]


@dataclass(frozen=True, slots=True)
class ImageDigest:
    """An image in the prompt: its placeholder tokens look alike, so the blocks they touch take up its digest.

    ``digest`` is 32 bytes and covers the file's bytes and the version of the preprocessing.
    """

    first_token: int
    num_tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.first_token < 0 or self.num_tokens <= 0 or len(self.digest) != IMAGE_DIGEST_BYTES:
            raise ValueError(
                f"impossible image: first_token={self.first_token}, num_tokens={self.num_tokens}, "
                f"digest of {len(self.digest)} bytes"
            )


def cache_root(
    weights_fingerprint: bytes,
    layout_fingerprint: bytes,
    number_format: str,
    backend: str,
    deterministic: bool,
) -> bytes:
    """Root of every chain whose blocks may be exchanged (32 bytes).

    Args:
        weights_fingerprint: Covers every tensor's bytes. layout_fingerprint: Covers the layout's version and
        numbers, the block length among them. number_format: How entries are stored and activations rounded.
        backend: Names what computed the bytes where back ends differ in bits; the same text where they do
        not. deterministic: Requests that ask for reproducible bits have a root of their own.
    """
    root = blake2b(digest_size=32, person=b"epdserve-root")
    fields = (weights_fingerprint, layout_fingerprint, number_format.encode(), backend.encode())
    for field in fields:
        root.update(struct.pack("<Q", len(field)))
        root.update(field)
    root.update(b"\x01" if deterministic else b"\x00")
    return root.digest()


def prefix_hash_chain(
    tokens: TokenIds,
    *,
    block_tokens: int,
    root: bytes,
    tenant_key: bytes,
    image_digests: Sequence[ImageDigest] = (),
) -> list[BlockHash]:
    """Hash of every *full* block of a prompt, in order.

    Args:
        tokens: Token ids, 0 .. 2**32 - 1.
        block_tokens: Tokens a block holds.
        root: From ``cache_root``.
        tenant_key: 1 to 64 secret bytes.
        image_digests: Images of the prompt, in order of their first token.

    Returns:
        ``len(tokens) // block_tokens`` hashes of 16 bytes.

    Raises:
        ValueError: A token id out of range, an empty or too long key, a block length that is not positive.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be positive, got {block_tokens}")
    keyed = _keyed(tenant_key)
    num_blocks = len(tokens) // block_tokens
    block_bytes = 4 * block_tokens
    stream = memoryview(_little_endian(tokens, num_blocks * block_tokens))
    images = _images_by_block(image_digests, block_tokens, num_blocks)
    digest = _start(keyed, block_tokens, root)
    chain: list[BlockHash] = []
    for block in range(num_blocks):
        link = keyed.copy()
        link.update(digest)
        link.update(stream[block * block_bytes : (block + 1) * block_bytes])
        if images:
            link.update(images.get(block, b""))
        digest = link.digest()
        chain.append(BlockHash(digest))
    return chain


def chain_start(*, block_tokens: int, root: bytes, tenant_key: bytes) -> BlockHash:
    """What the first block of a chain follows: the parent of tails that have no full block."""
    return BlockHash(_start(_keyed(tenant_key), block_tokens, root))


def tenant_label(tenant_key: bytes) -> bytes:
    """16 bytes that name a tenant where bytes outlive processes, and do not tell its key.

    Of a longer key the first 16 bytes count: what follows them keeps a tenant's users apart from one another, and its
    quota and its deletion are about all of them.
    """
    if not 0 < len(tenant_key) <= _MAX_KEY_BYTES:
        raise ValueError(f"tenant_key must have 1 to {_MAX_KEY_BYTES} bytes, got {len(tenant_key)}")
    whose = tenant_key[:TENANT_LABEL_BYTES]
    return blake2b(key=whose, digest_size=TENANT_LABEL_BYTES, person=b"epdserve-tenant").digest()


def _keyed(tenant_key: bytes) -> blake2b:
    # copy() of a keyed hasher is cheaper than a new one: the key costs a whole compression
    if not 0 < len(tenant_key) <= _MAX_KEY_BYTES:
        raise ValueError(f"tenant_key must have 1 to {_MAX_KEY_BYTES} bytes, got {len(tenant_key)}")
    return blake2b(key=tenant_key, digest_size=BLOCK_HASH_BYTES, person=b"epdserve-block")


def _start(keyed: blake2b, block_tokens: int, root: bytes) -> bytes:
    link = keyed.copy()
    link.update(struct.pack("<IIQ", CHAIN_VERSION, block_tokens, len(root)))
    link.update(root)
    return link.digest()


def _little_endian(tokens: TokenIds, count: int) -> bytes:
    ids = np.asarray(tokens[:count])
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids must be one row of integers, got {ids.dtype} of shape {ids.shape}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > _MAX_TOKEN:
        raise ValueError(f"token ids must lie in 0..{_MAX_TOKEN}, got {low}..{high}")
    return ids.astype("<u4").tobytes()


def _images_by_block(images: Sequence[ImageDigest], block_tokens: int, num_blocks: int) -> dict[int, bytes]:
    by_block: dict[int, bytes] = {}
    for image in images:
        first = image.first_token // block_tokens
        last = (image.first_token + image.num_tokens - 1) // block_tokens
        for block in range(first, min(last + 1, num_blocks)):
            # where the image starts seen from this block: the same picture shifted gives other embeddings
            record = (
                struct.pack("<qQ", image.first_token - block * block_tokens, image.num_tokens) + image.digest
            )
            by_block[block] = by_block.get(block, b"") + record
    return by_block
