"""Lightning indexer in plain PyTorch (spec/backbone.md 5). S = sequences, Q = queries, E = entries, H = index heads."""

from __future__ import annotations

from typing import Final

import torch
from epdserve.kernels.cache_ops.reference import gather_rows_ref
from epdserve.kernels.indexer.pages import IndexPages, RowTiles
from epdserve.kernels.quant.reference import dequantize_fp4_e8m0_ref
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


def score_pages_ref(
    q_THB: Tensor,
    q_scale: Tensor,
    w_TH: Tensor,
    pages: IndexPages,
    tiles: RowTiles,
    visible_T: Tensor,
    entries: int,
) -> Tensor:
    """Score of every visible entry of each row's segment: (T, entries) float32, -inf elsewhere.

    Args:
        q_THB, q_scale: Packed E2M1 (T, H, D / 2) and UE8M0 (T, H, D / 32).
        w_TH: (T, H) float32.
        tiles: Which rows belong to which segment.
        visible_T: How many entries a row sees.
        entries: Columns of the result.
    """
    query_THD = dequantize_fp4_e8m0_ref(q_THB, q_scale)
    out = w_TH.new_full((len(w_TH), entries), _MINUS_INF)
    position = torch.arange(entries, device=w_TH.device)
    for first, count, segment in tiles.table.tolist():
        some = slice(first, first + count)
        key_ED, exists_E = _keys(pages, torch.full_like(position, segment), position, query_THD.shape[2])
        scores = score_entries_ref(query_THD[None, some], w_TH[None, some], key_ED[None])[0]
        hidden = ~exists_E | (position >= visible_T[some].unsqueeze(1))
        out[some] = scores.masked_fill(hidden, _MINUS_INF)
    return out


def score_blocks_ref(
    q_THB: Tensor,
    q_scale: Tensor,
    w_TH: Tensor,
    pages: IndexPages,
    segment_T: Tensor,
    visible_T: Tensor,
    blocks_TC: Tensor,
    block_size: int,
) -> Tensor:
    """Scores of each row's candidate blocks only: (T, C * block_size) float32 in the order of the blocks.

    Args:
        segment_T: (T,) row of the page table.
        blocks_TC: (T, C) block numbers, -1 = none.
    """
    within = torch.arange(block_size, device=blocks_TC.device)
    entry_TK = (blocks_TC.clamp(min=0).unsqueeze(2) * block_size + within).flatten(1)
    segment_TK = segment_T.unsqueeze(1).expand_as(entry_TK)
    query_THD = dequantize_fp4_e8m0_ref(q_THB, q_scale)
    key_TKD, exists_TK = _keys(pages, segment_TK, entry_TK, query_THD.shape[2])
    scores = score_entries_ref(query_THD.unsqueeze(1), w_TH.unsqueeze(1), key_TKD).squeeze(1)
    wanted = (blocks_TC >= 0).repeat_interleave(block_size, 1) & (entry_TK < visible_T.unsqueeze(1))
    return scores.masked_fill(~(wanted & exists_TK), _MINUS_INF)


def candidate_blocks_ref(
    score_RE: Tensor, visible_R: Tensor, blocks: int, block_size: int, *, chunk: int = 8192
) -> Tensor:
    """The blocks whose union is ``candidate_mask_ref``: (R, blocks) int64 ascending, -1 where there are fewer."""
    mask_RE = candidate_mask_ref(score_RE, visible_R, blocks, block_size)
    chosen = mask_RE[:, ::block_size].float().masked_fill_(~mask_RE[:, ::block_size], _MINUS_INF)
    return top_entries_ref(chosen, visible_R.new_full((len(visible_R),), chosen.shape[1]), blocks)


def entries_of_slots_ref(slots_RK: Tensor, blocks_RC: Tensor, block_size: int) -> Tensor:
    """Entries of slots chosen among a row's candidate scores (``score_blocks``): (R, K) int64, -1 stays."""
    block = blocks_RC.gather(1, slots_RK.clamp(min=0) // block_size)
    return torch.where(slots_RK < 0, slots_RK, block * block_size + slots_RK % block_size)


def _keys(pages: IndexPages, segment: Tensor, entry: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Float32 keys (..., D) of entries of segments, and which of them have a page."""
    place, within = entry // pages.entries_per_page, entry % pages.entries_per_page
    inside = place < pages.table_SP.shape[1]
    page = pages.table_SP[segment, place.clamp(max=pages.table_SP.shape[1] - 1)].long()
    exists = inside & (page >= 0) & (page < len(pages.pages_PB))
    page = torch.where(exists, page, 0)
    parts = [
        gather_rows_ref(pages.pages_PB, page, offset + within * nbytes, nbytes)
        for offset, nbytes in ((pages.values_offset, dim // 2), (pages.scales_offset, dim // 32))
    ]
    return dequantize_fp4_e8m0_ref(*parts), exists


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
