"""Matrix products in float32 whose rows are independent of one another, to the bit.

CPU sgemm gives a row the same bits whatever stands beside it under two conditions (measured: kernels/README.md). Every
thread's share of rows must fill the smallest kernel, four rows: fewer take another path and round differently. And
with few columns every row must start on a 16-byte boundary, since sums begin at the boundary. So rows and K are padded
with zeros to a multiple of four.
"""

from __future__ import annotations

from typing import Final

import torch
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.quant.reference import dequantize_fp8_blocks_ref, dequantize_fp8_ref
from torch import Tensor

_QUAD: Final = 4
_MIN_PRODUCTS: Final = 400  # a batched product below this many multiplications per matrix is a plain loop


def linear_ref(x: Tensor, weight_NK: Tensor) -> Tensor:
    """``x`` (..., K) times the transpose of ``weight_NK``: (..., N) float32.

    Args:
        x: (..., K) float32.
        weight_NK: (N, K) float32; best with K a multiple of four, else both are copied on every call.

    Numerics: float32 sums. A row's bits depend on that row and the weight only.
    """
    outputs, inputs = weight_NK.shape
    if outputs == 1:  # a matrix-vector product splits its sums by the number of rows
        return (x * weight_NK[0]).sum(-1, keepdim=True)
    if x.dim() == 2 and not (x.shape[0] % _QUAD or inputs % _QUAD) and x.shape[0]:
        return torch.mm(x, weight_NK.t())  # nothing to pad: most calls of a full batch
    rows_TK = x.reshape(-1, inputs)
    rows = rows_TK.shape[0]
    more_rows, more_inputs = _missing_rows(rows, _QUAD), -inputs % _QUAD
    if more_inputs:
        weight_NK = torch.constant_pad_nd(weight_NK, (0, more_inputs))
    if more_rows or more_inputs:
        rows_TK = torch.constant_pad_nd(rows_TK, (0, more_inputs, 0, more_rows))
    return torch.mm(rows_TK, weight_NK.t())[:rows].view(*x.shape[:-1], outputs)


def grouped_linear_ref(x_TGK: Tensor, weight_GNK: Tensor) -> Tensor:
    """One weight per group: (T, G, N) float32, out[t, g] = weight[g] @ x[t, g]; rows independent as in ``linear``."""
    _, outputs, inputs = weight_GNK.shape
    rows = x_TGK.shape[0]
    more_rows = _missing_rows(rows, max(_QUAD, -(-_MIN_PRODUCTS // (outputs * inputs))))
    more_inputs = -inputs % _QUAD
    if more_inputs:
        weight_GNK = torch.constant_pad_nd(weight_GNK, (0, more_inputs))
    if more_rows or more_inputs:
        x_TGK = torch.constant_pad_nd(x_TGK, (0, more_inputs, 0, 0, 0, more_rows))
    return torch.bmm(x_TGK.transpose(0, 1), weight_GNK.transpose(1, 2)).transpose(0, 1)[:rows]


def _missing_rows(rows: int, least: int) -> int:
    """Rows to add for a multiple of four, at least ``least`` in all."""
    return max(-(-rows // _QUAD), -(-least // _QUAD)) * _QUAD - rows


def linear_fp8_ref(
    codes_TK: Tensor,
    scale_TG: Tensor,
    weight_NK: Tensor,
    weight_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """FP8 rows times an FP8 weight with 32x32 scales, both widened exactly: (T, N). ``tile`` means nothing here."""
    x_TK = dequantize_fp8_ref(codes_TK, scale_TG)
    return linear_ref(x_TK, dequantize_fp8_blocks_ref(weight_NK, weight_scale)).to(out_dtype)


def linear_bf16_ref(
    x_TK: Tensor, weight_NK: Tensor, *, out_dtype: torch.dtype = torch.bfloat16, tile: Tile | None = None
) -> Tensor:
    """bfloat16 rows times a bfloat16 weight: (T, N). ``tile`` means nothing here."""
    return linear_ref(x_TK.float(), weight_NK.float()).to(out_dtype)


def grouped_linear_fp8_ref(
    x_TGK: Tensor,
    weight_GNK: Tensor,
    weight_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """bfloat16 rows of G groups, each times its own FP8 weight: (T, G, N). ``tile`` means nothing here."""
    wide = [dequantize_fp8_blocks_ref(*part) for part in zip(weight_GNK, weight_scale, strict=True)]
    return grouped_linear_ref(x_TGK.float(), torch.stack(wide)).to(out_dtype)
