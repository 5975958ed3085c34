"""RMS normalisation on a GPU: a program a row."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import HIDDEN, Entry, Work
from epdserve.kernels.launch import (
    FLOATS,
    LaunchRefusedError,
    aligned_rows,
    check_contiguous,
    check_tensor,
    next_power_of_2,
)
from epdserve.kernels.quant.codes import narrow
from torch import Tensor

_MAX_CHANNELS: Final = 16_384


@triton.jit
def rms_norm_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    STRIDE_X: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = x / sqrt(mean(x**2) + eps) * weight, for the row of this program."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    mask = channel < D
    x = tl.load(x_ptr + row * STRIDE_X + channel, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=mask, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, axis=0), D * 1.0)
    rate = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(out_ptr + row * D + channel, narrow(x * rate * weight, out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` (..., D) divided by its root mean square and multiplied by ``weight`` (D); dtype of ``x``.

    Args:
        x: tl.tensor float dtype; rows may have gaps between them, channels may not.
        weight: tl.tensor float dtype, contiguous.
        eps: Added to the mean square.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take, or more than 16,384 channels.

    Numerics: float32 inside, squares summed as a fixed tree, IEEE division and root, one final cast. A row's bits
    depend on that row alone. A NaN makes its row NaN; an infinity makes its own channel NaN and the others zero.
    """
    rows_TD = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    channels = rows_TD.shape[1]
    check_tensor("x", rows_TD, FLOATS, (None, None))
    check_tensor("weight", weight, FLOATS, (channels,), like=x)
    check_contiguous("weight", weight)
    if channels > _MAX_CHANNELS:
        raise LaunchRefusedError(f"x has {channels} channels, {_MAX_CHANNELS} are taken")
    rows_TD = aligned_rows(rows_TD)
    out_TD = torch.empty(rows_TD.shape, dtype=x.dtype, device=x.device)
    if out_TD.numel():
        block = next_power_of_2(channels)
        rms_norm_kernel[(rows_TD.shape[0],)](
            rows_TD,
            weight,
            out_TD,
            eps,
            STRIDE_X=rows_TD.stride(0),
            D=channels,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out_TD.view(x.shape)


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


def _entry(channels: int) -> Entry:
    block = next_power_of_2(channels)
    return Entry(
        name=f"rms_norm {channels}",
        kernel=rms_norm_kernel,
        signature={"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "eps": "fp32"},
        constexprs={"STRIDE_X": channels, "D": channels, "BLOCK": block},
        num_warps=_warps(block),
        work=tuple(
            Work(f"T={rows}", bytes_moved=4 * rows * channels + 2 * channels, flops=4 * rows * channels)
            for rows in (8192, 32)
        ),
    )


ENTRIES: Final = tuple(_entry(channels) for channels in (HIDDEN, 1280, 512, 128))
