"""Deterministic top-k on a GPU: best score first, then the lower index; and the candidate blocks (spec/backbone.md 5).

A tournament. A program takes a chunk of a row, finds its k-th best key bit by bit, and writes the chosen in the order
of their indices; the winners of all chunks are the next round's row, until one chunk is left. Chunks and rounds depend
on the row's length only, and a total order has one answer, whatever the chunks.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.launch import INDICES, LaunchRefusedError, check_tensor, next_power_of_2
from torch import Tensor

CHUNK: Final = 8192  # scores of a program

_LEAST = tl.constexpr(-0x80000000)
_MINUS_INF_KEY = tl.constexpr(-0x7F800001)  # key of -inf: chosen are the keys above it


@triton.jit
def _key(score: tl.tensor) -> tl.tensor:
    """Int32 that sorts as the scores do; both zeros are one."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_key(key: tl.tensor, k: tl.tensor) -> tl.tensor:
    """The largest number that at least k keys reach: the k-th best key, or the least number if there are fewer."""
    threshold = tl.where(tl.sum((key >= 0).to(tl.int32), axis=0) >= k, 0, _LEAST)
    for i in range(31):
        raised = threshold | (1 << (30 - i))
        threshold = tl.where(tl.sum((key >= raised).to(tl.int32), axis=0) >= k, raised, threshold)
    return threshold


@triton.jit
def select_kernel(
    score_ptr: tl.tensor,
    index_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    out_score_ptr: tl.tensor,
    out_index_ptr: tl.tensor,
    length: tl.tensor,
    stride_score: tl.tensor,
    stride_out: tl.tensor,
    k: tl.tensor,
    HAS_INDEX: tl.constexpr,
    K_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """The k best of one chunk of one row, in the order of their places; -1 (score -inf) fills up."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    if HAS_INDEX:
        end = length
        index = tl.load(index_ptr + row * stride_score + place, mask=place < end, other=-1)
    else:
        end = tl.minimum(length, tl.load(visible_ptr + row).to(tl.int32))
        index = place
    score = tl.load(score_ptr + row * stride_score + place, mask=place < end, other=float("-inf"))
    key = _key(score)
    threshold = _kth_key(key, k)
    above = key > threshold
    ties = (key == threshold).to(tl.int32)
    room = k - tl.sum(above.to(tl.int32), axis=0)
    chosen = (above | ((key == threshold) & (tl.cumsum(ties, axis=0) <= room))) & (key > _MINUS_INF_KEY)
    rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    found = tl.sum(chosen.to(tl.int32), axis=0)
    start = row * stride_out + chunk * k
    tl.store(out_index_ptr + start + rank, index.to(out_index_ptr.dtype.element_ty), mask=chosen)
    tl.store(out_score_ptr + start + rank, score, mask=chosen)
    rest = tl.arange(0, K_BLOCK)
    empty = (rest >= found) & (rest < k)
    tl.store(
        out_index_ptr + start + rest, tl.full((K_BLOCK,), -1, out_index_ptr.dtype.element_ty), mask=empty
    )
    tl.store(out_score_ptr + start + rest, tl.full((K_BLOCK,), float("-inf"), tl.float32), mask=empty)


@triton.jit
def block_max_kernel(
    score_ptr: tl.tensor,
    visible_ptr: tl.tensor,
    out_ptr: tl.tensor,
    entries: tl.tensor,
    stride_score: tl.tensor,
    num_blocks: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Best visible score of each block of entries; +inf for the block of the newest visible entry."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    end = tl.minimum(entries, tl.load(visible_ptr + row).to(tl.int32))
    entry = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    score = tl.load(score_ptr + row * stride_score + entry, mask=entry < end, other=float("-inf"))
    best = tl.max(score, axis=1)
    newest = (end > 0) & (block == (end - 1) // BLOCK_SIZE)
    best = tl.where(newest, float("inf"), best)
    tl.store(out_ptr + row * num_blocks + block, best, mask=block < num_blocks)


def top_entries(score_RE: Tensor, visible_R: Tensor, k: int) -> Tensor:
    """``top_entries_in_chunks`` of ``CHUNK`` scores; arguments and result as ``top_entries_ref``."""
    return top_entries_in_chunks(score_RE, visible_R, k, chunk=CHUNK)


def top_entries_in_chunks(score_RE: Tensor, visible_R: Tensor, k: int, *, chunk: int) -> Tensor:
    """Indices of the best visible entries of each row: (R, k) int64 ascending, -1 where there are fewer.

    Args:
        score_RE: (R, E) float32, E below 2**31; rows may have gaps between them. Nothing is read from ``visible`` on.
        visible_R: (R,) int32 or int64.
        k: At least 1.
        chunk: Scores of a program, a power of two above k.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: bitwise equal to ``top_entries_ref``; integers only. Scores of -inf are never chosen, a positive NaN is
    better than +inf, a negative one is never chosen.
    """
    rows, entries = score_RE.shape
    check_tensor("score_RE", score_RE, (torch.float32,), (None, None))
    check_tensor("visible_R", visible_R, INDICES, (rows,), like=score_RE)
    if k < 1 or chunk & (chunk - 1) or 2 * k > chunk:
        raise LaunchRefusedError(
            f"cannot choose {k} in chunks of {chunk}: a power of two of at least 2 k is needed"
        )
    index: Tensor | None = None
    while True:
        chunks = max(1, triton.cdiv(entries, chunk))
        last = chunks == 1
        out_score = torch.empty(rows, chunks * k, dtype=torch.float32, device=score_RE.device)
        out_index = torch.empty(
            rows, chunks * k, dtype=torch.int64 if last else torch.int32, device=score_RE.device
        )
        if rows:
            select_kernel[(rows, chunks)](
                score_RE, score_RE if index is None else index, visible_R, out_score, out_index,
                entries, score_RE.stride(0), out_score.stride(0), k,
                HAS_INDEX=index is not None, K_BLOCK=next_power_of_2(k), CHUNK=chunk, num_warps=warps(chunk),
            )  # fmt: skip
        if last:
            return out_index
        score_RE, index, entries = out_score, out_index, chunks * k


def block_max(score_RE: Tensor, visible_R: Tensor, block_size: int) -> Tensor:
    """Best visible score of each candidate block, +inf for the newest visible entry's block, -inf without one.

    Returns:
        (R, ceil(E / block_size)) float32.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: a maximum does not round. A NaN score may or may not be seen.
    """
    rows, entries = score_RE.shape
    check_tensor("score_RE", score_RE, (torch.float32,), (None, None))
    check_tensor("visible_R", visible_R, INDICES, (rows,), like=score_RE)
    if block_size <= 0 or block_size & (block_size - 1):
        raise LaunchRefusedError(f"block_size must be a power of two, got {block_size}")
    num_blocks = triton.cdiv(entries, block_size)
    out = torch.empty(rows, num_blocks, dtype=torch.float32, device=score_RE.device)
    if out.numel():
        blocks = max(1, 2048 // block_size)
        block_max_kernel[(rows, triton.cdiv(num_blocks, blocks))](
            score_RE, visible_R, out, entries, score_RE.stride(0), num_blocks,
            BLOCK_SIZE=block_size, BLOCKS=blocks, num_warps=4,
        )  # fmt: skip
    return out


def candidate_blocks(
    score_RE: Tensor, visible_R: Tensor, blocks: int, block_size: int, *, chunk: int = CHUNK
) -> Tensor:
    """Blocks that later index layers may choose from: (R, blocks) int64 ascending, -1 where there are fewer.

    Arguments as ``candidate_mask_ref``; the mask there is the union of these blocks. Errors and numerics as
    ``top_entries_in_chunks``.
    """
    best = block_max(score_RE, visible_R, block_size)
    return top_entries_in_chunks(
        best, visible_R.new_full((score_RE.shape[0],), best.shape[1]), blocks, chunk=chunk
    )


def warps(chunk: int) -> int:
    """Warps of a program with so many scores."""
    return max(1, min(16, chunk // 512))
