"""Sparse attention's launcher: each row over its window and its selected entries (kernels.py says how)."""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.attention.kernels import all_splits_kernel, merge_kernel, one_split_kernel
from epdserve.kernels.attention.unpack import SMALLER
from epdserve.kernels.launch import LaunchRefusedError, check_contiguous, check_tensor
from torch import Tensor

SPLIT_KEYS: Final = 64
LEAST_HEADS: Final = 16
MERGED_HEADS: Final = 8  # of a program that merges splits
MANY_ROWS: Final = (
    96  # rows from which one program does all splits of a row: most of a GPU's processors then work
)
WARPS: Final = 8


def sparse_attention(
    q_THD: Tensor,
    window: Window,
    selected: Selected | None,
    sink_H: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    one_program_a_row: bool | None = None,
) -> Tensor:
    """One softmax of each row over its window, its selected entries and a sink; rotated back: (T, H, D) bfloat16.

    Args:
        q_THD: (T, H, D) bfloat16 rotated queries, contiguous; H a power of two, D one from 64. Fewer than 16 heads are
            filled up with zeros: a matrix instruction has no use for less.
        window: What each row sees of the sliding window.
        selected: None in layers without compressed entries.
        sink_H: (H,) float32, finite.
        cos, sin: (T, pairs) float32, contiguous: angles of each row's position, undone on the last 2 * pairs channels.
        one_program_a_row: Which kernels run; the number of rows decides otherwise. Results have the same bits.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernels do not take.

    Numerics: entries are exact. Scores are float32 sums, scaled after the sum; a split's weights are rounded to
    bfloat16 for the product with the entries and summed unrounded; float32 merging without fused operations. The
    quotient is rounded to bfloat16, rotated in float32, rounded again. Against exact arithmetic an output differs by at
    most 2**-8 of the largest entry in its channel from weights, and by bfloat16's roundings. A row without an entry
    gives zeros. A row's bits depend on that row only.
    """
    rows, heads, dim = q_THD.shape
    _check(q_THD, window, selected, sink_H, cos, sin)
    if heads < LEAST_HEADS:
        missing = LEAST_HEADS - heads
        wide_THD = torch.constant_pad_nd(q_THD, (0, 0, 0, missing))
        sink = torch.constant_pad_nd(sink_H, (0, missing))
        return sparse_attention(
            wide_THD, window, selected, sink, cos, sin, one_program_a_row=one_program_a_row
        )[:, :heads]
    out = torch.empty_like(q_THD)
    if not out.numel():
        return out
    common, sizes, selection = _arguments(q_THD, window, selected)
    shape = {"D": dim, "WINDOW": window.index_TW.shape[1], "KEYS": SPLIT_KEYS}
    per_page = selected.entries_per_page if selected else 1
    splits = triton.cdiv(window.index_TW.shape[1], SPLIT_KEYS) + triton.cdiv(selection, SPLIT_KEYS)
    if rows >= MANY_ROWS if one_program_a_row is None else one_program_a_row:
        all_splits_kernel[(rows,)](
            *common, sink_H, cos, sin, out, *sizes, splits,
            H=heads, PAIRS=cos.shape[1], PER_PAGE=per_page, **shape,
            num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
        return out
    part = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=out.device)
    stat = torch.empty(rows, splits, 2, heads, dtype=torch.float32, device=out.device)
    if splits:
        one_split_kernel[(rows, splits)](
            *common, part, stat, *sizes, splits,
            H=heads, PER_PAGE=per_page, **shape, num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    some = min(heads, MERGED_HEADS)
    merge_kernel[(rows, heads // some)](
        part, stat, sink_H, cos, sin, out, splits, heads,
        H=some, D=dim, PAIRS=cos.shape[1], num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _arguments(
    q_THD: Tensor, window: Window, selected: Selected | None
) -> tuple[tuple[Tensor, ...], tuple[int | float, ...], int]:
    """Tensors, then sizes, that both kernels take in this order; and how many entries are selected at most."""
    scale = q_THD.shape[2] ** -0.5 * math.log2(math.e) / SMALLER.value
    rows_NB, index_TW = window.rows_NB, window.index_TW
    ring = (rows_NB.view(torch.int16), rows_NB, index_TW)
    first = (len(rows_NB), index_TW.stride(0))
    if selected is None:
        return (
            (q_THD, *ring, rows_NB, index_TW, index_TW, index_TW),
            (*first, 0, 0, 0, 0, 0, 0, 0, 0, scale),
            0,
        )
    pages, table, entries = selected.pages_PB, selected.table_SP, selected.entries_TK
    sizes = (
        *first, entries.shape[1], entries.stride(0), table.stride(0), table.shape[1],
        *pages.shape, selected.values_offset, selected.scales_offset, scale,
    )  # fmt: skip
    return (q_THD, *ring, pages, table, selected.segment_T, entries), sizes, entries.shape[1]


def _check(
    q_THD: Tensor, window: Window, selected: Selected | None, sink_H: Tensor, cos: Tensor, sin: Tensor
) -> None:
    check_tensor("q_THD", q_THD, (torch.bfloat16,), (None, None, None))
    rows, heads, dim = q_THD.shape
    for name, size, least in (("heads", heads, 1), ("D", dim, 64)):
        if size < least or size & (size - 1):
            raise LaunchRefusedError(f"{name} must be a power of two of at least {least}, got {size}")
    window.check(rows, dim)
    if selected is not None:
        selected.check(rows, dim)
    check_tensor("sink_H", sink_H, (torch.float32,), (heads,), like=q_THD)
    check_tensor("cos", cos, (torch.float32,), (rows, None), like=q_THD)
    check_tensor("sin", sin, (torch.float32,), (rows, cos.shape[1]), like=q_THD)
    for name, tensor in (("q_THD", q_THD), ("cos", cos), ("sin", sin)):
        check_contiguous(name, tensor)
    if 2 * cos.shape[1] > dim:
        raise LaunchRefusedError(f"cannot rotate {2 * cos.shape[1]} of {dim} channels")
