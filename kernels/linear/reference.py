"""Matrix products in float32 whose rows are independent of one another, to the bit.

CPU sgemm gives a row the same bits whatever stands beside it as long as every thread's share of rows fills its
smallest kernel, four rows; fewer rows take another path and round differently (measured: kernels/README.md). So the
rows are padded with zeros to a multiple of four, at least eight.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

_ROWS: Final = 4
_MIN_ROWS: Final = 8
_MIN_PRODUCTS: Final = 400  # a batched product below this many multiplications per matrix is a plain loop


def _padded_rows(rows: int, min_rows: int) -> int:
    return max(-(-rows // _ROWS) * _ROWS, min_rows)


def linear_ref(x: Tensor, weight_NK: Tensor) -> Tensor:
    """``x`` (..., K) times the transpose of ``weight_NK``: (..., N) float32.

    Numerics: float32 sums. A row's bits depend on that row and the weight only.
    """
    if weight_NK.shape[0] == 1:  # a matrix-vector product splits its sums by the number of rows
        return (x * weight_NK[0]).sum(-1, keepdim=True)
    rows_TK = x.reshape(-1, x.shape[-1])
    rows = rows_TK.shape[0]
    padded = _padded_rows(rows, _MIN_ROWS)
    if padded != rows:
        rows_TK = pad(rows_TK, (0, 0, 0, padded - rows))
    return torch.mm(rows_TK, weight_NK.t())[:rows].view(*x.shape[:-1], weight_NK.shape[0])


def grouped_linear_ref(x_TGK: Tensor, weight_GNK: Tensor) -> Tensor:
    """One weight per group: (T, G, N) float32, out[t, g] = weight[g] @ x[t, g]; rows independent as in ``linear``."""
    _, outputs, inputs = weight_GNK.shape
    rows = x_TGK.shape[0]
    min_rows = max(_MIN_ROWS, -(-_MIN_PRODUCTS // (outputs * inputs)))
    padded = _padded_rows(rows, min_rows)
    x_GTK = pad(x_TGK, (0, 0, 0, 0, 0, padded - rows)).transpose(0, 1)
    return torch.bmm(x_GTK, weight_GNK.transpose(1, 2)).transpose(0, 1)[:rows]
