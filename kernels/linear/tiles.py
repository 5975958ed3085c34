"""The product that linear layers and experts share: a tile of weight rows times a tile of input rows.

Weights stand left and inputs right, so that one shape of matrix instruction serves one row and a thousand: 64 weight
rows fill it whatever the batch. An output is a sum over K in splits of ``SPLIT_K``: each split is summed from zero by
the matrix unit, and splits are added in order. Who computes a split is free; the sum is not.

Formats of an operand: ``e4m3`` bytes with UE8M0 scales, ``e2m1`` two to a byte with UE8M0 scales, ``bf16``. Products of
two stored values are exact in float32.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.quant.codes import e4m3_value, e8m0_value

SPLIT_K: Final = 1280  # a multiple of every BLOCK_K: 5120 of the model's K are four splits

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # its bf16 products are wrong: widen first


FEW_ROWS: Final = Tile(n=64, t=16, k=128, warps=4, stages=4)
MANY_ROWS: Final = Tile(n=128, t=128, k=64, warps=8, stages=3)
MANY: Final = 128  # input rows from which the large tile is used


@triton.jit
def _load_weight(
    w_ptr: tl.tensor,
    n: tl.tensor,
    n_inside: tl.tensor,
    stride: tl.tensor,
    k: tl.tensor,
    inputs: tl.tensor,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> tl.tensor:
    """(BLOCK_N, BLOCK_K) weights from channel k on; e2m1 stays packed."""
    per_byte: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    column = k // per_byte + tl.arange(0, BLOCK_K // per_byte)
    inside = n_inside[:, None]
    if not EVEN_K:
        inside = inside & (column < inputs // per_byte)[None, :]
    return tl.load(w_ptr + n.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0)


@triton.jit
def _load_scale(
    s_ptr: tl.tensor,
    row: tl.tensor,
    inside: tl.tensor,
    stride: tl.tensor,
    k: tl.tensor,
    inputs: tl.tensor,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> tl.tensor:
    """(rows, BLOCK_K / 32) scale bytes; 1.0 outside."""
    group = k // 32 + tl.arange(0, BLOCK_K // 32)
    mask = inside[:, None]
    if not EVEN_K:
        mask = mask & (group < inputs // 32)[None, :]
    return tl.load(s_ptr + row.to(tl.int64)[:, None] * stride + group[None, :], mask=mask, other=127)


@triton.jit
def _wide_product(
    w: tl.tensor, w_scale: tl.tensor, x: tl.tensor, acc: tl.tensor, FORMAT: tl.constexpr
) -> tl.tensor:
    """What the matrix unit does with bfloat16 inputs, for the interpreter: widened to float32 first."""
    if FORMAT == "e4m3":
        BLOCK_N: tl.constexpr = w.shape[0]
        BLOCK_K: tl.constexpr = w.shape[1]
        value = tl.reshape(e4m3_value(w.to(tl.int32)), (BLOCK_N, BLOCK_K // 32, 32))
        scale = e8m0_value(w_scale.to(tl.int32))
        w = tl.reshape(value * scale[:, :, None], (BLOCK_N, BLOCK_K))
    return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def tile_product(
    w_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    n: tl.tensor,
    n_inside: tl.tensor,
    stride_w: tl.tensor,
    stride_w_scale: tl.tensor,
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    row: tl.tensor,
    row_inside: tl.tensor,
    stride_x: tl.tensor,
    stride_x_scale: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    inputs: tl.tensor,
    W_FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> tl.tensor:
    """(BLOCK_N, BLOCK_T) float32: sum of w[n, k] * x[row, k] over k from ``first`` to ``last - 1``, in order."""
    acc = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    scale_row = n // 32 if W_FORMAT == "e4m3" else n
    for k in range(first, last, BLOCK_K):
        w = _load_weight(w_ptr, n, n_inside, stride_w, k, inputs, W_FORMAT, BLOCK_K, EVEN_K)
        channel = k + tl.arange(0, BLOCK_K)
        mask = row_inside[None, :]
        if not EVEN_K:
            mask = mask & (channel < inputs)[:, None]
        x = tl.load(x_ptr + row.to(tl.int64)[None, :] * stride_x + channel[:, None], mask=mask, other=0)
        if W_FORMAT == "bf16":
            if _INTERPRETED:
                acc = tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
            else:
                acc = tl.dot(w, x, acc)
        else:
            w_scale = _load_scale(
                w_scale_ptr, scale_row, n_inside, stride_w_scale, k, inputs, BLOCK_K, EVEN_K
            )
            if X_FORMAT == "e4m3":
                x_scale = _load_scale(
                    x_scale_ptr, row, row_inside, stride_x_scale, k, inputs, BLOCK_K, EVEN_K
                )
                acc = tl.dot_scaled(w, w_scale, W_FORMAT, x, x_scale, X_FORMAT, acc)
            elif _INTERPRETED:
                acc = _wide_product(w, w_scale, x, acc, W_FORMAT)
            else:
                acc = tl.dot_scaled(w, w_scale, W_FORMAT, x, None, X_FORMAT, acc)
    return acc
