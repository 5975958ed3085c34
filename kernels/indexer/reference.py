"""Lightning indexer in plain PyTorch (spec/backbone.md 5). S = sequences, Q = queries, E = entries, H = index heads."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

NO_ENTRY: Final = -1
_MINUS_INF: Final = float("-inf")
_KEYS_ABOVE_MINUS_INF: Final = -0x7F800000 << 32  # see _best_indices: the key of -inf has -0x7F800001 on top
_MIN_ENTRIES: Final = 16  # products with fewer than 12 columns round differently (kernels/README.md)


def score_entries_ref(q_SQHD: Tensor, w_SQH: Tensor, k_SED: Tensor, max_bytes: int = 4 << 20) -> Tensor:
    """Score of every entry for every query: (S, Q, E) float32, ``sum_h w_h * relu(q_h . k)``.

    Args:
        q_SQHD: (S, Q, H, D) index queries.
        w_SQH: (S, Q, H) head weights, softmax scale included.
        k_SED: (S, E, D) index keys, one for all heads.
        max_bytes: Bound of the per-head scores held at once; queries are taken in chunks that fit, one at least. The
            default keeps a chunk in the processor's cache (64 MiB took 1.2 to 1.6 times as long).

    Numerics: heads are added pairwise, so that neither E nor the chunk decides the order of a sum.
    """
    sequences, queries, heads, _ = q_SQHD.shape
    entries = k_SED.shape[1]
    if entries < _MIN_ENTRIES:
        k_SED = torch.constant_pad_nd(k_SED, (0, 0, 0, _MIN_ENTRIES - entries))
    key_SDE = k_SED.transpose(1, 2)
    chunk = max(1, max_bytes // max(1, 4 * sequences * heads * key_SDE.shape[2]))
    parts = [
        _score_chunk(q_SQHD[:, start : start + chunk], w_SQH[:, start : start + chunk], key_SDE)
        for start in range(0, max(queries, 1), chunk)
    ]
    score_SQE = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return score_SQE[:, :, :entries]


def _score_chunk(q_SQHD: Tensor, w_SQH: Tensor, key_SDE: Tensor) -> Tensor:
    sequences, queries, heads, _ = q_SQHD.shape
    score = torch.bmm(q_SQHD.flatten(1, 2), key_SDE).view(sequences, queries, heads, key_SDE.shape[2])
    score.relu_().mul_(w_SQH.unsqueeze(-1))
    while heads > 2:
        half = heads // 2
        score[:, :, :half].add_(score[:, :, heads - half : heads])
        heads -= half
    return score[:, :, 0] + score[:, :, 1] if heads == 2 else score[:, :, 0]


def top_entries_ref(score_RE: Tensor, visible_R: Tensor, k: int) -> Tensor:
    """Indices of the best visible entries of each row: (R, k) int64 ascending, -1 where there are fewer.

    Entries ``>= visible`` and entries scored -inf are never chosen. Equal scores go to the lower index.
    """
    entries = score_RE.shape[1]
    masked = _mask_invisible(score_RE, visible_R)
    if entries <= k:
        index = torch.arange(entries, device=score_RE.device)
        index = index.masked_fill(masked == _MINUS_INF, entries)
    else:
        index = _best_indices(masked, k, entries)
    index = index.sort(dim=1).values
    index = index.masked_fill_(index == entries, NO_ENTRY)
    return torch.constant_pad_nd(index, (0, k - index.shape[1]), value=NO_ENTRY) if entries < k else index


def candidate_mask_ref(score_RE: Tensor, visible_R: Tensor, blocks: int, block_size: int) -> Tensor:
    """Entries that later index layers may choose from: (R, E) bool, the union of the best blocks of entries.

    A block's score is its best visible entry; the block of the newest visible entry is always in; blocks without a
    visible entry never are.
    """
    rows, entries = score_RE.shape
    num_blocks = -(-entries // block_size)
    visible = _mask_invisible(score_RE, visible_R)
    padded = torch.constant_pad_nd(visible, (0, num_blocks * block_size - entries), value=_MINUS_INF)
    best = padded.view(rows, num_blocks, block_size).amax(2)
    position = torch.arange(num_blocks, device=best.device)
    newest = (visible_R.clamp(max=entries) - 1).div(block_size, rounding_mode="floor").unsqueeze(1)
    # no block is number -1, so a row that sees nothing pins none
    best = best.masked_fill_(position == newest, float("inf"))
    if num_blocks > blocks:
        spare = torch.zeros(rows, num_blocks + 1, dtype=torch.bool, device=best.device)
        chosen = spare.scatter_(1, _best_indices(best, blocks, num_blocks), True)[:, :num_blocks]
    else:
        chosen = best > _MINUS_INF
    return chosen.repeat_interleave(block_size, dim=1)[:, :entries]


def _mask_invisible(score_RE: Tensor, visible_R: Tensor) -> Tensor:
    position = torch.arange(score_RE.shape[1], device=score_RE.device)
    return score_RE.masked_fill(position >= visible_R.unsqueeze(1), _MINUS_INF)


def _best_indices(score_RE: Tensor, k: int, none: int) -> Tensor:
    """(R, k) int64 indices of the best scores, in no order; ``none`` in place of scores of -inf.

    The keys are distinct int64 numbers: the float's bits, made to sort as integers, above 32 bits of inverted index,
    so equal scores go to the lower index.
    """
    bits = (score_RE + 0.0).view(torch.int32)  # + 0.0 makes the two zeros one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = score_RE.shape[1] - 1
    inverted = torch.arange(last, -1, -1, device=score_RE.device)
    best = ((ordered.long() << 32) | inverted).topk(k, dim=1, sorted=False).values
    return (last - (best & 0xFFFFFFFF)).masked_fill_(best < _KEYS_ABOVE_MINUS_INF, none)
