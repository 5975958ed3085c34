"""Coefficients of hyper-connections from their projection on a GPU: gates, and Sinkhorn in a fixed order."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import COPIES, HIDDEN, Entry, Work
from epdserve.kernels.launch import LaunchRefusedError, check_contiguous, check_tensor
from torch import Tensor

MIXES: Final = COPIES * (COPIES + 2)  # pre | post | comb
PARTIAL: Final = 32  # mixes, then the sum of squares, then nothing
_ROWS: Final = 32  # of a program
_MAX_ITERS: Final = 1000


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x)) with IEEE division."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def line_divided(m: tl.tensor, axis: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """(rows, 4, 4) divided by the sums along an axis, plus eps."""
    return tl.div_rn(m, tl.sum(m, axis=axis, keep_dims=True) + eps)


@triton.jit(do_not_specialize=["rows"])
def coefficients_kernel(
    partial_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    base_ptr: tl.tensor,
    pre_ptr: tl.tensor,
    post_ptr: tl.tensor,
    comb_ptr: tl.tensor,
    rows: tl.tensor,
    norm_eps: tl.tensor,
    hc_eps: tl.tensor,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ITERS: tl.constexpr,
    MIXES: tl.constexpr,
    PARTIAL: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Shares of the projection added in order, normalised, and turned into the three kinds of coefficients."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    four = tl.arange(0, 4)
    cell = 4 * four[:, None] + four[None, :]
    squares = tl.zeros((ROWS,), tl.float32)
    pre = tl.zeros((ROWS, 4), tl.float32)
    post = tl.zeros((ROWS, 4), tl.float32)
    comb = tl.zeros((ROWS, 4, 4), tl.float32)
    for part in range(PARTS):
        share = partial_ptr + (row * PARTS + part) * PARTIAL
        squares += tl.load(share + MIXES, mask=live, other=0.0)
        pre += tl.load(share[:, None] + four[None, :], mask=live[:, None], other=0.0)
        post += tl.load(share[:, None] + 4 + four[None, :], mask=live[:, None], other=0.0)
        comb += tl.load(share[:, None, None] + 8 + cell[None, :, :], mask=live[:, None, None], other=0.0)
    rate = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, WIDTH * 1.0) + norm_eps))
    pre = pre * rate[:, None] * tl.load(scale_ptr) + tl.load(base_ptr + four)[None, :]
    post = post * rate[:, None] * tl.load(scale_ptr + 1) + tl.load(base_ptr + 4 + four)[None, :]
    comb = comb * rate[:, None, None] * tl.load(scale_ptr + 2) + tl.load(base_ptr + 8 + cell)[None, :, :]
    gates = row[:, None] * 4 + four[None, :]
    tl.store(pre_ptr + gates, sigmoid(pre) + hc_eps, mask=live[:, None])
    tl.store(post_ptr + gates, 2.0 * sigmoid(post), mask=live[:, None])

    comb = tl.exp(comb - tl.max(comb, axis=2, keep_dims=True))
    comb = tl.div_rn(comb, tl.sum(comb, axis=2, keep_dims=True)) + hc_eps
    comb = line_divided(comb, 1, hc_eps)
    for _ in range(ITERS - 1):
        comb = line_divided(comb, 2, hc_eps)
        comb = line_divided(comb, 1, hc_eps)
    target = comb_ptr + row[:, None, None] * 16 + cell[None, :, :]
    tl.store(target, comb, mask=live[:, None, None])


def coefficients_of(
    partial: Tensor,
    channels: int,
    scale: Tensor,
    base: Tensor,
    iters: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``pre``, ``post``, ``comb`` of the shares (T, parts, 32) that ``streams_kernel`` wrote; ``channels`` of a copy.

    Raises:
        LaunchRefusedError: A dtype or shape that the kernel does not take.

    Numerics: shares added in order; IEEE division and root; Sinkhorn row by row in registers, in the spec's order
    (row softmax + eps, column, then row and column in turn), so that a row's bits depend on that row alone.
    """
    rows, parts, _ = partial.shape
    for name, constant, size in (("scale", scale, 3), ("base", base, MIXES)):
        check_tensor(name, constant, (torch.float32,), (size,), like=partial)
        check_contiguous(name, constant)
    if not 1 <= iters <= _MAX_ITERS:
        raise LaunchRefusedError(f"iters must be 1 .. {_MAX_ITERS}, got {iters}")
    pre, post = partial.new_empty(rows, COPIES), partial.new_empty(rows, COPIES)
    comb = partial.new_empty(rows, COPIES, COPIES)
    if rows:
        coefficients_kernel[(triton.cdiv(rows, _ROWS),)](
            partial,
            scale,
            base,
            pre,
            post,
            comb,
            rows,
            norm_eps,
            hc_eps,
            PARTS=parts,
            WIDTH=COPIES * channels,
            ITERS=iters,
            MIXES=MIXES,
            PARTIAL=PARTIAL,
            ROWS=_ROWS,
            num_warps=1,
        )
    return pre, post, comb


_PARTS: Final = HIDDEN // 256
ENTRIES: Final = (
    Entry(
        name="mhc coefficients",
        kernel=coefficients_kernel,
        signature={f"{name}_ptr": "*fp32" for name in ("partial", "scale", "base", "pre", "post", "comb")}
        | {"rows": "i32", "norm_eps": "fp32", "hc_eps": "fp32"},
        constexprs={
            "PARTS": _PARTS,
            "WIDTH": COPIES * HIDDEN,
            "ITERS": 20,
            "MIXES": MIXES,
            "PARTIAL": PARTIAL,
            "ROWS": _ROWS,
        },
        num_warps=1,
        work=tuple(
            Work(
                f"T={rows}",
                bytes_moved=rows * 4 * (_PARTS * 25 + MIXES),
                flops=rows * (_PARTS * 25 + 20 * 64),
            )
            for rows in (8192, 32)
        ),
    ),
)
