"""Names of cached bytes: hash chains of full blocks, and the identity of a tail."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.hashing import ImageDigest, prefix_hash_chain
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash


@dataclass(frozen=True, slots=True)
class CacheNames:
    """Names what a worker caches; workers of one root use the same names for the same bytes."""

    root: bytes
    block_tokens: int

    def chain(
        self, tokens: npt.NDArray[np.integer], tenant_key: bytes, images: Sequence[ImageDigest] = ()
    ) -> list[BlockHash]:
        """Hash of every full block of ``tokens``, in which ``images`` stand.

        Raises:
            ValueError: The tenant key is empty or too long, or a token id is out of range.
        """
        return prefix_hash_chain(
            tokens,
            block_tokens=self.block_tokens,
            root=self.root,
            tenant_key=tenant_key,
            image_digests=images,
        )

    def tail(
        self,
        tokens: npt.NDArray[np.integer],
        chain: Sequence[BlockHash],
        tenant_key: bytes,
        images: Sequence[ImageDigest] = (),
    ) -> bytes:
        """Identity (16 bytes) of the tail after exactly ``tokens``: last full block and the tokens after it.

        Args:
            tokens: All ids that blocks and tail cover.
            chain: At least the hashes of their full blocks.
            tenant_key: As for ``chain``.
            images: Likewise; those that reach beyond the last full block count.
        """
        blocks = len(tokens) // self.block_tokens
        parent = chain[blocks - 1] if blocks else self.root
        rest = np.asarray(tokens[blocks * self.block_tokens :]).astype("<u4").tobytes()
        name = blake2b(key=tenant_key, digest_size=BLOCK_HASH_BYTES, person=b"epdserve-tail")
        name.update(struct.pack("<QQ", len(tokens), len(parent)) + parent + rest)
        for image in images:
            end = image.first_token + image.num_tokens
            if end > blocks * self.block_tokens and image.first_token < len(tokens):
                name.update(struct.pack("<QQ", image.first_token, image.num_tokens) + image.digest)
        return name.digest()
