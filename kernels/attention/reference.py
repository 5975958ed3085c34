"""Attention over gathered entries in plain PyTorch (spec/backbone.md 3). Keys and values are the same vectors."""

from __future__ import annotations

import torch
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.cache_ops.reference import gather_rows_ref
from epdserve.kernels.quant.reference import dequantize_fp4_e4m3_ref, dequantize_fp8_ref
from epdserve.kernels.rope.reference import apply_rope_inverse_ref
from torch import Tensor


def sink_attention_ref(
    q_THD: Tensor, kv_TND: Tensor, valid_TN: Tensor, sink_H: Tensor, scale: float
) -> Tensor:
    """One softmax over each token's own entries, with a sink in the denominator.

    Args:
        q_THD: (T, H, D) queries.
        kv_TND: (T, N, D) entries of each token, shared by all heads. Must be finite where not valid.
        valid_TN: (T, N) bool, which entries count.
        sink_H: (H,) logit of the sink, not multiplied by ``scale``; it contributes no value.
        scale: Factor of the scores.

    Returns:
        (T, H, D) float32. A token without a valid entry gives zeros.

    Numerics: a row's bits depend on that row, N and D only.
    """
    score = torch.bmm(q_THD.float() * scale, kv_TND.float().transpose(1, 2))
    score.masked_fill_(~valid_TN.unsqueeze(1), float("-inf"))
    sink = sink_H.float().view(1, -1, 1).expand(score.shape[0], -1, -1)
    weight = torch.cat((score, sink), dim=2).softmax(-1)
    return torch.bmm(weight[..., :-1], kv_TND.float())


def sparse_attention_ref(
    q_THD: Tensor,
    window: Window,
    selected: Selected | None,
    sink_H: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    one_program_a_row: bool | None = None,
) -> Tensor:
    """``sink_attention_ref`` over each row's packed window rows and selected entries, rotated back: (T, H, D).

    Args:
        q_THD: (T, H, D) rotated queries; the result has their type.
        window: What each row sees of the sliding window.
        selected: None in layers without compressed entries.
        sink_H: (H,) float32.
        cos, sin: (T, pairs) float32: angles of each row's position.
        one_program_a_row: Means nothing here.
    """
    dim = q_THD.shape[2]
    valid = (window.index_TW >= 0) & (window.index_TW < len(window.rows_NB))
    rows = window.rows_NB[torch.where(valid, window.index_TW, 0)]
    entries = dequantize_fp8_ref(rows[..., :dim], rows[..., dim:])
    if selected is not None:
        more, exist = _selected(selected, dim)
        entries, valid = torch.cat((entries, more), dim=1), torch.cat((valid, exist), dim=1)
    entries = entries.masked_fill_(~valid.unsqueeze(2), 0.0)
    out = sink_attention_ref(q_THD, entries, valid, sink_H, dim**-0.5)
    return apply_rope_inverse_ref(out.to(q_THD.dtype), cos, sin)


def _selected(selected: Selected, dim: int) -> tuple[Tensor, Tensor]:
    """Float32 entries (T, K, D), and which of them exist."""
    entry = selected.entries_TK
    place, within = entry // selected.entries_per_page, entry % selected.entries_per_page
    inside = (entry >= 0) & (place < selected.table_SP.shape[1])
    page = selected.table_SP[selected.segment_T.unsqueeze(1), torch.where(inside, place, 0)].long()
    exist = inside & (page >= 0) & (page < len(selected.pages_PB))
    page = torch.where(exist, page, 0)
    parts = [
        gather_rows_ref(selected.pages_PB, page, offset + within * nbytes, nbytes)
        for offset, nbytes in ((selected.values_offset, dim // 2), (selected.scales_offset, dim // 16))
    ]
    return dequantize_fp4_e4m3_ref(*parts), exist
