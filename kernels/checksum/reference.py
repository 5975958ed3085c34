"""Page checksums in plain PyTorch; what is summed and why stands in weights.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from epdserve.kernels.checksum.weights import MASK_64, WORD_BYTES, seed, weights_numpy
from torch import Tensor


def checksum_weights_ref(num_words: int) -> Tensor:
    """(num_words,) int64 odd weights on the CPU, one per 32-bit word of payload."""
    return torch.from_numpy(weights_numpy(num_words))


@cache
def _weights(num_words: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return checksum_weights_ref(num_words).to(device)


def page_checksums_ref(
    pages_PB: Tensor, page_ids: Sequence[int], payload_bytes: int, hashes: Sequence[bytes]
) -> list[int]:
    """Checksum (0 .. 2**64-1) of the first ``payload_bytes`` of each named page, seeded with length and hash.

    Args:
        pages_PB: (P, B) uint8 pool.
        page_ids: Pages to read.
        payload_bytes: Bytes that count; padded with zeros to whole words.
        hashes: 16-byte block hash of each page, in the order of ``page_ids``.
    """
    sums: list[int] = []
    weights = _weights(-(-payload_bytes // WORD_BYTES), pages_PB.device)
    aligned = payload_bytes % WORD_BYTES == 0 and pages_PB.shape[1] % WORD_BYTES == 0
    for page in page_ids:  # page by page: one page's words stay in the processor's cache
        payload = pages_PB[page, :payload_bytes]
        if not aligned:
            payload = torch.cat((payload, payload.new_zeros(-payload_bytes % WORD_BYTES)))
        sums.append(int(payload.view(torch.int32).long().mul_(weights).sum()))
    return [(total + seed(payload_bytes, block)) & MASK_64 for total, block in zip(sums, hashes, strict=True)]
