"""Index scores straight from packed FP4 pages (spec/backbone.md 5).

A program widens one tile of keys once and meets one query after another with it: prefill streams the rows of a chunk
past the tile, decode has one row a sequence. Both run the same instructions for a row, so a row's score does not
depend on the shape of the batch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.indexer.pages import IndexPages, RowTiles
from epdserve.kernels.launch import INDICES, LaunchRefusedError, check_contiguous, check_tensor
from torch import Tensor

BLOCK_ENTRIES: Final = 128
WARPS: Final = 8


@triton.jit
def _load_keys(
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    entry: tl.tensor,
    wanted: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    D: tl.constexpr,
    PER_PAGE: tl.constexpr,
) -> tl.tensor:
    """Packed keys (entries, D / 2), their scales (entries, D / 32), and which of them exist."""
    place = entry // PER_PAGE
    page = tl.load(table_ptr + place, mask=wanted & (place < table_pages), other=-1).to(tl.int64)
    exists = (page >= 0) & (page < num_pages)
    start = pages_ptr + page * page_bytes
    within = entry % PER_PAGE
    byte = tl.arange(0, D // 2)
    group = tl.arange(0, D // 32)
    value = start[:, None] + values_offset + within[:, None] * (D // 2) + byte[None, :]
    scale = start[:, None] + scales_offset + within[:, None] * (D // 32) + group[None, :]
    return (
        tl.load(value, mask=exists[:, None], other=0),
        tl.load(scale, mask=exists[:, None], other=127),
        exists,
    )


@triton.jit
def _score_row(
    key: tl.tensor,
    key_scale: tl.tensor,
    q_ptr: tl.tensor,
    q_scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    row: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
) -> tl.tensor:
    """(entries,) float32: sum over heads of w * relu(q . k). A product that is NaN counts as zero."""
    head = tl.arange(0, H)
    byte = tl.arange(0, D // 2)
    group = tl.arange(0, D // 32)
    q = tl.load(q_ptr + row * (H * D // 2) + head[None, :] * (D // 2) + byte[:, None])
    q_scale = tl.load(q_scale_ptr + row * (H * D // 32) + head[:, None] * (D // 32) + group[None, :])
    w = tl.load(w_ptr + row * H + head)
    dot = tl.dot_scaled(key, key_scale, "e2m1", q, q_scale, "e2m1")
    return tl.sum(tl.where(dot > 0.0, dot, 0.0) * w[None, :], axis=1)


@triton.jit
def score_pages_kernel(
    q_ptr: tl.tensor,
    q_scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    tile_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    out_ptr: tl.tensor,
    entries: tl.tensor,
    stride_table: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    stride_out: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PER_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Scores of one tile of entries for the rows of one tile of rows."""
    first = tl.load(tile_ptr + tl.program_id(1) * 3)
    count = tl.load(tile_ptr + tl.program_id(1) * 3 + 1)
    segment = tl.load(tile_ptr + tl.program_id(1) * 3 + 2).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    most = tl.load(visible_ptr + first + count - 1)  # a tile's rows stand in the order of their positions
    if tl.program_id(0) * BLOCK < most:
        key, key_scale, exists = _load_keys(
            pages_ptr, table_ptr + segment * stride_table, entry, entry < most, table_pages, num_pages,
            page_bytes, values_offset, scales_offset, D, PER_PAGE,
        )  # fmt: skip
        for i in range(count):
            row = (first + i).to(tl.int64)
            score = _score_row(key, key_scale, q_ptr, q_scale_ptr, w_ptr, row, H, D)
            seen = exists & (entry < tl.load(visible_ptr + row))
            target = out_ptr + row * stride_out + entry
            tl.store(target, tl.where(seen, score, float("-inf")), mask=entry < entries)


@triton.jit
def score_blocks_kernel(
    q_ptr: tl.tensor,
    q_scale_ptr: tl.tensor,
    w_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    segment_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    blocks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    slots: tl.tensor,
    stride_blocks: tl.tensor,
    stride_table: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    PER_PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Scores of a tile of one row's candidates: slot s is entry s % BLOCK_SIZE of block blocks[s // BLOCK_SIZE]."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    block = tl.load(blocks_ptr + row * stride_blocks + slot // BLOCK_SIZE, mask=inside, other=-1).to(tl.int32)
    entry = tl.maximum(block, 0) * BLOCK_SIZE + slot % BLOCK_SIZE
    wanted = (block >= 0) & (entry < tl.load(visible_ptr + row))
    segment = tl.load(segment_ptr + row).to(tl.int64)
    key, key_scale, exists = _load_keys(
        pages_ptr, table_ptr + segment * stride_table, entry, wanted, table_pages, num_pages,
        page_bytes, values_offset, scales_offset, D, PER_PAGE,
    )  # fmt: skip
    score = _score_row(key, key_scale, q_ptr, q_scale_ptr, w_ptr, row, H, D)
    tl.store(out_ptr + row * slots + slot, tl.where(wanted & exists, score, float("-inf")), mask=inside)


def score_pages(
    q_THB: Tensor,
    q_scale: Tensor,
    w_TH: Tensor,
    pages: IndexPages,
    tiles: RowTiles,
    visible_T: Tensor,
    entries: int,
) -> Tensor:
    """Score of every visible entry: (T, entries) float32, -inf where invisible or without a page.

    Args:
        q_THB, q_scale: (T, H, D / 2) packed E2M1 and (T, H, D / 32) UE8M0, contiguous (``quantize_fp4_e8m0``).
        w_TH: (T, H) float32 head weights, softmax scale included, contiguous.
        tiles: Rows of each segment; every row once. A segment's rows stand in the order of their positions.
        visible_T: (T,) int32 or int64, how many entries a row sees.
        entries: Columns of the result; a multiple of 4 keeps rows aligned. At most 2**31 - 1.

    A tile of 128 entries that no row of its tile of rows sees is not written: look at no column from ``visible`` on.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: exact products, float32 sums over channels by the matrix unit, over heads by a fixed tree. Bits of a score
    depend on that query and key only.
    """
    rows, heads, dim = _check_query(q_THB, q_scale, w_TH, visible_T)
    check_tensor("tiles", tiles.table, (torch.int32,), (None, 3), like=q_THB)
    out = torch.empty(rows, entries, dtype=torch.float32, device=q_THB.device)
    if out.numel() and len(tiles.table):
        score_pages_kernel[(triton.cdiv(entries, BLOCK_ENTRIES), len(tiles.table))](
            q_THB, q_scale, w_TH, pages.pages_PB, pages.table_SP, tiles.table, visible_T, out,
            entries, *pages.arguments(), out.stride(0),
            H=heads, D=dim, PER_PAGE=pages.entries_per_page, BLOCK=BLOCK_ENTRIES, num_warps=WARPS,
        )  # fmt: skip
    return out


def score_blocks(
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
        segment_T: (T,) int32 or int64, row of the page table.
        blocks_TC: (T, C) int32 or int64 block numbers, -1 = none.
        block_size: Entries of a block, a power of two.

    Others, errors and numerics as ``score_pages``; a score has the same bits there and here.
    """
    rows, heads, dim = _check_query(q_THB, q_scale, w_TH, visible_T)
    check_tensor("segment_T", segment_T, INDICES, (rows,), like=q_THB)
    check_tensor("blocks_TC", blocks_TC, INDICES, (rows, None), like=q_THB)
    if block_size <= 0 or block_size & (block_size - 1):
        raise LaunchRefusedError(f"block_size must be a power of two, got {block_size}")
    slots = blocks_TC.shape[1] * block_size
    out = torch.empty(rows, slots, dtype=torch.float32, device=q_THB.device)
    if out.numel():
        score_blocks_kernel[(triton.cdiv(slots, BLOCK_ENTRIES), rows)](
            q_THB, q_scale, w_TH, pages.pages_PB, pages.table_SP, segment_T, visible_T, blocks_TC, out,
            slots, blocks_TC.stride(0), *pages.arguments(),
            H=heads, D=dim, PER_PAGE=pages.entries_per_page, BLOCK_SIZE=block_size, BLOCK=BLOCK_ENTRIES,
            num_warps=WARPS,
        )  # fmt: skip
    return out


def _check_query(q_THB: Tensor, q_scale: Tensor, w_TH: Tensor, visible_T: Tensor) -> tuple[int, int, int]:
    check_tensor("q_THB", q_THB, (torch.uint8,), (None, None, None))
    rows, heads, half = q_THB.shape
    check_tensor("q_scale", q_scale, (torch.uint8,), (rows, heads, half // 16), like=q_THB)
    check_tensor("w_TH", w_TH, (torch.float32,), (rows, heads), like=q_THB)
    check_tensor("visible_T", visible_T, INDICES, (rows,), like=q_THB)
    for name, tensor in (("q_THB", q_THB), ("q_scale", q_scale), ("w_TH", w_TH)):
        check_contiguous(name, tensor)
    for name, size in (("heads", heads), ("D", 2 * half)):
        if size < 16 or size & (size - 1):
            raise LaunchRefusedError(f"{name} must be a power of two of at least 16, got {size}")
    return rows, heads, 2 * half
