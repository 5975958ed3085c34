"""Attention of each row over its window and its selected compressed entries, read packed (spec/backbone.md 3).

Keys come in splits of ``SPLIT_KEYS``: the window first, then the selection. A split's softmax is computed on its own
and splits are merged one after another, sink first. With few rows a program computes one split and a second kernel
merges; with many a program computes and merges all splits of its row. Both do the same operations on the same numbers.

Channels live as even and odd halves: a byte of FP4 holds such a pair, two bytes of FP8 are read as one 16-bit word, a
RoPE pair is one number of each half. So nothing is shuffled inside the loop, and the inverse rotation is free. They are
taken in two pieces, the lower and the upper channels, so that a split's own sums are a quarter beside the row's.
"""

from __future__ import annotations

import triton
import triton.language as tl
from epdserve.kernels.attention.unpack import LARGER, main_entries, window_entries
from epdserve.kernels.quant.codes import narrow

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # its bf16 products are wrong: widen first


@triton.jit
def _operand(x: tl.tensor) -> tl.tensor:
    """What a matrix product takes; every value fits in bfloat16."""
    if _INTERPRETED:
        return x.to(tl.float32)
    return x.to(tl.bfloat16)


@triton.jit
def _rounded(x: tl.tensor) -> tl.tensor:
    """Float32 x as the nearest bfloat16, widened again."""
    return narrow(x, tl.bfloat16).to(tl.float32)


@triton.jit
def _load_query(
    q_ptr: tl.tensor, row: tl.tensor, H: tl.constexpr, D: tl.constexpr, PIECE: tl.constexpr
) -> tl.tensor:
    """Even and odd channels of one piece of a row's heads, (H, D / 4) each."""
    head = tl.arange(0, H)
    pair = PIECE * (D // 4) + tl.arange(0, D // 4)
    q = q_ptr + row * (H * D) + head[:, None] * D + 2 * pair[None, :]
    return _operand(tl.load(q)), _operand(tl.load(q + 1))


@triton.jit
def _split_entries(
    rows_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    window_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    split: tl.tensor,
    window_rows: tl.tensor,
    chosen: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """Even and odd channels of a split's keys as product operands, and which keys exist: the window's splits first."""
    window_splits: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    if split < window_splits:
        even, odd, valid = window_entries(
            rows_ptr, scales_ptr, window_ptr, split * KEYS, window_rows, D, WINDOW, KEYS, PIECE
        )
        even, odd = _operand(even), _operand(odd)
    else:
        even, odd, valid = main_entries(
            pages_ptr, table_ptr, chosen_ptr, (split - window_splits) * KEYS, chosen,
            table_pages, num_pages, page_bytes, values_offset, scales_offset, D, PER_PAGE, KEYS, PIECE,
        )  # fmt: skip
        even, odd = _operand(even), _operand(odd)
    return even, odd, valid


@triton.jit
def _split_softmax(score: tl.tensor, valid: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Weights (H, keys) against the split's own maximum, rounded to bfloat16; the maximum; the sum before rounding."""
    score = tl.where(valid[None, :], score * scale, float("-inf"))
    most = tl.max(score, axis=1)
    weight = tl.exp2(score - tl.where(most == float("-inf"), 0.0, most)[:, None])
    return _operand(narrow(weight, tl.bfloat16)), most, tl.sum(weight, axis=1)


@triton.jit
def _add_product(score: tl.tensor, q: tl.tensor, keys: tl.tensor, once: tl.tensor) -> tl.tensor:
    """Score (H, keys) plus q keys^T. ``once`` is 1, which the compiler must not know.

    A product that another product is seen to depend on gets a layout of one column of warps. 64 heads fill four warps
    of it; the other four would compute the same again, in registers that then spill. Nobody looks out of a loop.
    """
    for _ in range(once):
        score = tl.dot(q, tl.trans(keys), score, input_precision="ieee")
    return score


@triton.jit
def _weigh_split(
    q_even0: tl.tensor,
    q_odd0: tl.tensor,
    q_even1: tl.tensor,
    q_odd1: tl.tensor,
    rows_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    window_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    split: tl.tensor,
    window_rows: tl.tensor,
    chosen: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    scale: tl.tensor,
    once: tl.tensor,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """A split's keys, even and odd channels of both pieces, and what ``_split_softmax`` makes of the row's scores."""
    even0, odd0, valid = _split_entries(
        rows_ptr, scales_ptr, window_ptr, pages_ptr, table_ptr, chosen_ptr, split, window_rows, chosen,
        table_pages, num_pages, page_bytes, values_offset, scales_offset, D, WINDOW, PER_PAGE, KEYS, 0,
    )  # fmt: skip
    tl.debug_barrier()  # or the second piece is fetched before the first has left its registers
    even1, odd1, valid = _split_entries(
        rows_ptr, scales_ptr, window_ptr, pages_ptr, table_ptr, chosen_ptr, split, window_rows, chosen,
        table_pages, num_pages, page_bytes, values_offset, scales_offset, D, WINDOW, PER_PAGE, KEYS, 1,
    )  # fmt: skip
    tl.debug_barrier()
    score = tl.zeros((q_even0.shape[0], KEYS), dtype=tl.float32)
    score = _add_product(score, q_even0, even0, once)
    score = _add_product(score, q_odd0, odd0, once)
    score = _add_product(score, q_even1, even1, once)
    score = _add_product(score, q_odd1, odd1, once)
    weight, best, added = _split_softmax(score, valid, scale)
    return even0, odd0, even1, odd1, weight, best, added


@triton.jit
def _merge(acc: tl.tensor, part: tl.tensor, old: tl.tensor, new: tl.tensor) -> tl.tensor:
    return acc * old[:, None] + part * new[:, None]


@triton.jit
def _finish(
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    even: tl.tensor,
    odd: tl.tensor,
    total: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Divide, round, rotate the last pairs back, round, store."""
    head = tl.arange(0, H)
    width: tl.constexpr = D // 2 // PIECES
    pair = PIECE * width + tl.arange(0, width)
    even = _rounded(tl.div_rn(even * LARGER, tl.broadcast_to(total[:, None], (H, width))))
    odd = _rounded(tl.div_rn(odd * LARGER, tl.broadcast_to(total[:, None], (H, width))))
    turning = pair - (D // 2 - PAIRS)
    cos = tl.load(cos_ptr + row * PAIRS + turning, mask=turning >= 0, other=1.0)[None, :]
    sin = tl.load(sin_ptr + row * PAIRS + turning, mask=turning >= 0, other=0.0)[None, :]
    back_even = even * cos + odd * sin
    back_odd = odd * cos - even * sin
    # What is not turned is copied: infinity times a sine of zero would be NaN
    even = tl.where((turning >= 0)[None, :], _rounded(back_even), even)
    odd = tl.where((turning >= 0)[None, :], _rounded(back_odd), odd)
    out = out_ptr + row * heads * D + head[:, None] * D + 2 * pair[None, :]
    tl.store(out, even.to(out_ptr.dtype.element_ty))
    tl.store(out + 1, odd.to(out_ptr.dtype.element_ty))


@triton.jit
def all_splits_kernel(
    q_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    window_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    segment_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    window_rows: tl.tensor,
    stride_window: tl.tensor,
    chosen: tl.tensor,
    stride_chosen: tl.tensor,
    stride_table: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    scale: tl.tensor,
    splits: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """One row: its splits in order, merged as they come."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, H)
    q_even0, q_odd0 = _load_query(q_ptr, row, H, D, 0)
    q_even1, q_odd1 = _load_query(q_ptr, row, H, D, 1)
    most = tl.maximum(tl.load(sink_ptr + head) * 1.4426950408889634, -1.0e30)
    total = tl.full((H,), 1.0, tl.float32)
    acc_even0 = tl.zeros((H, D // 4), dtype=tl.float32)
    acc_odd0 = tl.zeros((H, D // 4), dtype=tl.float32)
    acc_even1 = tl.zeros((H, D // 4), dtype=tl.float32)
    acc_odd1 = tl.zeros((H, D // 4), dtype=tl.float32)
    segment = tl.load(segment_ptr + row).to(tl.int64)
    for split in range(splits):
        even0, odd0, even1, odd1, weight, best, added = _weigh_split(
            q_even0, q_odd0, q_even1, q_odd1, rows_ptr, scales_ptr, window_ptr + row * stride_window,
            pages_ptr, table_ptr + segment * stride_table, chosen_ptr + row * stride_chosen,
            split, window_rows, chosen, table_pages, num_pages, page_bytes, values_offset, scales_offset, scale,
            tl.minimum(splits, 1), D, WINDOW, PER_PAGE, KEYS,
        )  # fmt: skip
        highest = tl.maximum(most, best)
        old, new = tl.exp2(most - highest), tl.exp2(best - highest)
        acc_even0 = _merge(acc_even0, tl.dot(weight, even0, input_precision="ieee"), old, new)
        acc_odd0 = _merge(acc_odd0, tl.dot(weight, odd0, input_precision="ieee"), old, new)
        acc_even1 = _merge(acc_even1, tl.dot(weight, even1, input_precision="ieee"), old, new)
        acc_odd1 = _merge(acc_odd1, tl.dot(weight, odd1, input_precision="ieee"), old, new)
        total = total * old + added * new
        most = highest
    _finish(out_ptr, cos_ptr, sin_ptr, row, H, acc_even0, acc_odd0, total, H, D, PAIRS, 0, 2)
    _finish(out_ptr, cos_ptr, sin_ptr, row, H, acc_even1, acc_odd1, total, H, D, PAIRS, 1, 2)


@triton.jit
def one_split_kernel(
    q_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    window_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    segment_ptr: tl.tensor,
    chosen_ptr: tl.tensor,
    part_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    window_rows: tl.tensor,
    stride_window: tl.tensor,
    chosen: tl.tensor,
    stride_chosen: tl.tensor,
    stride_table: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    scale: tl.tensor,
    splits: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """One split of one row: unmerged sums (H, even half | odd half), and per head the maximum and the weights' sum."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.arange(0, H)
    pair = tl.arange(0, D // 4)
    q_even0, q_odd0 = _load_query(q_ptr, row, H, D, 0)
    q_even1, q_odd1 = _load_query(q_ptr, row, H, D, 1)
    segment = tl.load(segment_ptr + row).to(tl.int64)
    even0, odd0, even1, odd1, weight, best, added = _weigh_split(
        q_even0, q_odd0, q_even1, q_odd1, rows_ptr, scales_ptr, window_ptr + row * stride_window,
        pages_ptr, table_ptr + segment * stride_table, chosen_ptr + row * stride_chosen,
        split, window_rows, chosen, table_pages, num_pages, page_bytes, values_offset, scales_offset, scale,
        tl.minimum(splits, 1), D, WINDOW, PER_PAGE, KEYS,
    )  # fmt: skip
    place = row * splits + split
    part = part_ptr + place * (H * D) + head[:, None] * D + pair[None, :]
    tl.store(part + 0, tl.dot(weight, even0, input_precision="ieee"))
    tl.store(part + D // 4, tl.dot(weight, even1, input_precision="ieee"))
    tl.store(part + D // 2, tl.dot(weight, odd0, input_precision="ieee"))
    tl.store(part + D // 4 * 3, tl.dot(weight, odd1, input_precision="ieee"))
    tl.store(stat_ptr + place * (2 * H) + head, best)
    tl.store(stat_ptr + place * (2 * H) + H + head, added)


@triton.jit
def merge_kernel(
    part_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    sink_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    splits: tl.tensor,
    heads: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """H heads of one row: its splits in order."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    head = tl.arange(0, H)
    pair = tl.arange(0, D // 2)
    most = tl.maximum(tl.load(sink_ptr + group * H + head) * 1.4426950408889634, -1.0e30)
    total = tl.full((H,), 1.0, tl.float32)
    acc_even = tl.zeros((H, D // 2), dtype=tl.float32)
    acc_odd = tl.zeros((H, D // 2), dtype=tl.float32)
    for split in range(splits):
        place = row * splits + split
        part = part_ptr + (place * heads + group * H) * D + head[:, None] * D + pair[None, :]
        best = tl.load(stat_ptr + place * (2 * heads) + group * H + head)
        added = tl.load(stat_ptr + place * (2 * heads) + heads + group * H + head)
        highest = tl.maximum(most, best)
        old, new = tl.exp2(most - highest), tl.exp2(best - highest)
        acc_even = _merge(acc_even, tl.load(part), old, new)
        acc_odd = _merge(acc_odd, tl.load(part + D // 2), old, new)
        total = total * old + added * new
        most = highest
    _finish(
        out_ptr + group * H * D, cos_ptr, sin_ptr, row, heads, acc_even, acc_odd, total, H, D, PAIRS, 0, 1
    )
