"""Page checksums in numpy: the same numbers as ``page_checksums`` for hosts that hold the bytes without torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from epdserve.kernels.checksum.weights import MASK_64, WORD_BYTES, seed, weights_numpy
from numpy.typing import NDArray


@cache
def _weights(num_words: int) -> NDArray[np.int64]:
    return weights_numpy(num_words)


def page_checksums_numpy(
    pages_PB: NDArray[np.uint8], page_ids: Sequence[int], payload_bytes: int, hashes: Sequence[bytes]
) -> list[int]:
    """Twin of ``page_checksums`` over a (P, B) uint8 array; arguments and result as there."""
    weights = _weights(-(-payload_bytes // WORD_BYTES))
    sums: list[int] = []
    for page in page_ids:
        payload = pages_PB[page, :payload_bytes]
        if payload_bytes % WORD_BYTES:
            payload = np.pad(payload, (0, -payload_bytes % WORD_BYTES))
        sums.append(int(np.dot(payload.view("<i4"), weights)))
    return [(total + seed(payload_bytes, block)) & MASK_64 for total, block in zip(sums, hashes, strict=True)]
