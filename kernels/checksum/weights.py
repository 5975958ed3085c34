"""Weights and seed of the page checksum, shared by its torch and numpy forms.

checksum = seed(payload bytes, block hash) + sum of word[i] * weight[i]   (mod 2**64)

Words are 32 bits wide, little-endian, read as signed. Every weight is odd, so a word that changes by any amount changes
the sum. The low 33 bits of weight i are 2*i + 1, so two weights differ by less than 2**33 in them and two words by less
than 2**32: the product of both differences cannot vanish mod 2**64, and two swapped words always change the sum. With
64-bit words no choice of odd weights could promise that. The high 31 bits are mixed, so that independent errors do not
cancel.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WORD_BYTES: Final = 4
MASK_64: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def weights_numpy(num_words: int) -> NDArray[np.int64]:
    """(num_words,) int64 odd weights; a prefix of every longer list."""
    index = np.arange(1, num_words + 1, dtype=np.uint64)
    mixed = index * np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(31)
    high = mixed & ~np.uint64((1 << 33) - 1)
    return (high | (index * np.uint64(2) - np.uint64(1))).view(np.int64)


def seed(payload_bytes: int, block_hash: bytes) -> int:
    """64 bits from the payload's length and the block's 16-byte hash: equal bytes of two blocks differ in checksum."""
    if len(block_hash) != 16:
        raise ValueError(f"a block hash has 16 bytes, got {len(block_hash)}")
    value = payload_bytes & MASK_64
    for start in (0, 8):
        value = (value + int.from_bytes(block_hash[start : start + 8], "little") + _GOLDEN) & MASK_64
        value = ((value ^ (value >> 30)) * _MIX_1) & MASK_64
        value = ((value ^ (value >> 27)) * _MIX_2) & MASK_64
        value ^= value >> 31
    return value
