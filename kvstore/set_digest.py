"""A digest of a set of blocks: how many there are, and all their hashes folded into one.

Two sets with one digest are the same but for a chance of 2^-128: hashes are random. Order does not matter, so a reader
may compute it from its own table, in whatever order that holds them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.types import BLOCK_HASH_BYTES, BlockHash

_FORM: Final = struct.Struct("<QQQ")
DIGEST_BYTES: Final = _FORM.size


def set_digest(hashes: Sequence[BlockHash]) -> bytes:
    """Digest of distinct blocks.

    Raises:
        ValueError: A hash of another length.
    """
    joined = b"".join(hashes)
    if len(joined) != BLOCK_HASH_BYTES * len(hashes):
        raise ValueError(f"hashes must have {BLOCK_HASH_BYTES} bytes")
    pairs = np.frombuffer(joined, "<u8").reshape(-1, 2)
    return folded(pairs[:, 0], pairs[:, 1])


def folded(lows: npt.NDArray[np.uint64], highs: npt.NDArray[np.uint64]) -> bytes:
    """Digest of blocks whose halves are given."""
    return packed(*fold(lows, highs))


def fold(lows: npt.NDArray[np.uint64], highs: npt.NDArray[np.uint64]) -> tuple[int, int, int]:
    """Number of blocks, and their halves folded: what a digest is made of."""
    return len(lows), int(np.bitwise_xor.reduce(lows)), int(np.bitwise_xor.reduce(highs))


def packed(count: int, low: int, high: int) -> bytes:
    """A digest from what it is made of."""
    return _FORM.pack(count, low, high)
