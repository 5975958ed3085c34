"""Linear layers over stored weights on a GPU: FP8 weights with 32x32 scales, or bfloat16 weights.

Few rows: a program a split of K, then the splits are added by a second kernel. Many rows: a program does all splits of
its tile. Both add the same numbers in the same order.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.launch import LaunchRefusedError, check_tensor
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.linear.tiles import FEW_ROWS, MANY, MANY_ROWS, SPLIT_K, tile_product
from epdserve.kernels.quant.codes import narrow
from torch import Tensor

_OUT: Final = (torch.bfloat16, torch.float32)
_ADD_BLOCK: Final = 1024


@triton.jit
def linear_kernel(
    w_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    splits: tl.tensor,
    stride_wg: tl.tensor,
    stride_w: tl.tensor,
    stride_wsg: tl.tensor,
    stride_ws: tl.tensor,
    stride_xg: tl.tensor,
    stride_x: tl.tensor,
    stride_xs: tl.tensor,
    stride_out_split: tl.tensor,
    stride_out: tl.tensor,
    W_FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    SPLIT: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> None:
    """A tile of the outputs of one group: all splits of K, or the one of this program."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    n_inside, row_inside = n < outputs, row < rows
    if ALL_SPLITS:
        group = tl.program_id(2).to(tl.int64)
        begin, end = 0, splits
    else:
        group = (tl.program_id(2) // splits).to(tl.int64)
        begin = tl.program_id(2) % splits
        end = begin + 1
        out_ptr += begin.to(tl.int64) * stride_out_split
    w_ptr += group * stride_wg
    w_scale_ptr += group * stride_wsg
    x_ptr += group * stride_xg
    out_ptr += group * outputs
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for split in range(begin, end):
        first = split * SPLIT
        last = tl.minimum(first + SPLIT, inputs)
        total += tile_product(
            w_ptr, w_scale_ptr, n, n_inside, stride_w, stride_ws,
            x_ptr, x_scale_ptr, row, row_inside, stride_x, stride_xs,
            first, last, inputs, W_FORMAT, X_FORMAT, BLOCK_N, BLOCK_T, BLOCK_K, EVEN_K,
        )  # fmt: skip
    target = out_ptr + row.to(tl.int64)[None, :] * stride_out + n[:, None]
    mask = n_inside[:, None] & row_inside[None, :]
    tl.store(target, narrow(total, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_splits_kernel(
    part_ptr: tl.tensor, out_ptr: tl.tensor, splits: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """out = part[0] + part[1] + ..., in this order, one rounding at the end."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in range(splits):
        total += tl.load(part_ptr + split * size + place, mask=inside, other=0.0)
    tl.store(out_ptr + place, narrow(total, out_ptr.dtype.element_ty), mask=inside)


def linear_fp8(
    codes_TK: Tensor,
    scale_TG: Tensor,
    weight_NK: Tensor,
    weight_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """FP8 rows times an FP8 weight with 32x32 scales: (T, N).

    Args:
        codes_TK, scale_TG: (T, K) E4M3 bytes and (T, K / 32) UE8M0 bytes (``quantize_fp8``).
        weight_NK, weight_scale: (N, K) E4M3 bytes, (ceil(N / 32), K / 32) UE8M0 bytes, rows may have gaps.
        tile: Another tile than the number of rows asks for.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: exact products, float32 sums (``tiles.py`` says in which order), one cast. Against exact arithmetic a sum
    of K products errs by at most K * 2**-24 * sum |w * x|. A row's bits depend on that row and the weight only, and not
    on ``tile``.
    """
    rows, inputs = codes_TK.shape
    check_tensor("codes_TK", codes_TK, (torch.uint8,), (None, None))
    check_tensor("scale_TG", scale_TG, (torch.uint8,), (rows, inputs // 32), like=codes_TK)
    return _launch(
        codes_TK.unsqueeze(1),
        scale_TG,
        weight_NK.unsqueeze(0),
        weight_scale.unsqueeze(0),
        "e4m3",
        "e4m3",
        out_dtype,
        tile,
    ).squeeze(1)


def linear_bf16(
    x_TK: Tensor, weight_NK: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None
) -> Tensor:
    """bfloat16 rows (T, K) times a bfloat16 weight (N, K): (T, N); errors and numerics as ``linear_fp8``."""
    check_tensor("x_TK", x_TK, (torch.bfloat16,), (None, None))
    weight_GNK = weight_NK.unsqueeze(0)
    return _launch(x_TK.unsqueeze(1), None, weight_GNK, None, "bf16", "bf16", out_dtype, tile).squeeze(1)


def grouped_linear_fp8(
    x_TGK: Tensor,
    weight_GNK: Tensor,
    weight_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """bfloat16 rows of G groups, each times its own FP8 weight: (T, G, N), out[t, g] = weight[g] @ x[t, g].

    Args:
        x_TGK: (T, G, K) bfloat16, not rounded to FP8 (spec/backbone.md 10, item 1).
        weight_GNK, weight_scale: (G, N, K) E4M3 bytes and (G, N / 32, K / 32) UE8M0 bytes; N a multiple of 32.

    Raises, numerics: as ``linear_fp8``.
    """
    check_tensor("x_TGK", x_TGK, (torch.bfloat16,), (None, None, None))
    return _launch(x_TGK, None, weight_GNK, weight_scale, "e4m3", "bf16", out_dtype, tile)


def _launch(
    x_TGK: Tensor,
    x_scale: Tensor | None,
    weight_GNK: Tensor,
    weight_scale: Tensor | None,
    w_format: str,
    x_format: str,
    out_dtype: torch.dtype,
    tile: Tile | None,
) -> Tensor:
    rows, groups, inputs = x_TGK.shape
    _check_weight(x_TGK, weight_GNK, weight_scale, w_format)
    if out_dtype not in _OUT:
        raise LaunchRefusedError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
    outputs = weight_GNK.shape[1]
    tile = tile or (MANY_ROWS if rows >= MANY else FEW_ROWS)
    splits = -(-inputs // SPLIT_K)
    alone = rows >= MANY or splits == 1
    out = torch.empty(rows, groups, outputs, dtype=out_dtype, device=x_TGK.device)
    if not out.numel():
        return out
    target = out if alone else torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
    some_scale = weight_GNK if weight_scale is None else weight_scale
    linear_kernel[(triton.cdiv(outputs, tile.n), triton.cdiv(rows, tile.t), groups * (1 if alone else splits))](
        weight_GNK, some_scale, x_TGK, x_TGK if x_scale is None else x_scale, target,
        rows, outputs, inputs, splits,
        weight_GNK.stride(0), weight_GNK.stride(1), some_scale.stride(0), some_scale.stride(1),
        x_TGK.stride(1), x_TGK.stride(0), 0 if x_scale is None else x_scale.stride(0),
        out.numel(), groups * outputs,
        W_FORMAT=w_format, X_FORMAT=x_format, SPLIT=SPLIT_K, ALL_SPLITS=alone,
        BLOCK_N=tile.n, BLOCK_T=tile.t, BLOCK_K=tile.k, EVEN_K=inputs % tile.k == 0,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not alone:
        add_splits_kernel[(triton.cdiv(out.numel(), _ADD_BLOCK),)](
            target, out, splits, out.numel(), BLOCK=_ADD_BLOCK
        )
    return out


def _check_weight(x_TGK: Tensor, weight_GNK: Tensor, weight_scale: Tensor | None, w_format: str) -> None:
    groups, inputs = x_TGK.shape[1:]
    if inputs % 32 or not inputs:
        raise LaunchRefusedError(f"K must be a multiple of 32, got {inputs}")
    dtype = torch.bfloat16 if w_format == "bf16" else torch.uint8
    check_tensor("weight", weight_GNK, (dtype,), (groups, None, inputs), like=x_TGK)
    if weight_scale is not None:
        outputs = weight_GNK.shape[1]
        check_tensor(
            "weight_scale",
            weight_scale,
            (torch.uint8,),
            (groups, -(-outputs // 32), inputs // 32),
            like=x_TGK,
        )
