"""Rotary position embedding on a GPU: a program a token and a few of its heads."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import HEADS, LATENT, ROTARY, Entry, Work
from epdserve.kernels.launch import (
    FLOATS,
    LaunchRefusedError,
    check_contiguous,
    check_tensor,
    next_power_of_2,
)
from epdserve.kernels.quant.codes import narrow
from torch import Tensor

_TILE: Final = 4096  # channels of a program, all its heads together


@triton.jit
def rotate_pairs(even: tl.tensor, odd: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tuple:
    """Even and odd channels turned by the angle of their pair; every product and sum is rounded on its own."""
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def rotate_tail(
    even: tl.tensor,
    odd: tl.tensor,
    angle_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    turning: tl.tensor,
    mask: tl.tensor,
    PAIRS: tl.constexpr,
    SIGN: tl.constexpr,
) -> tl.tuple:
    """Rotate the pairs whose number ``turning`` is 0 .. PAIRS - 1 and copy the others.

    ``angle_ptr``, ``sin_ptr``: where the row's cosines and sines start; they, ``turning`` and ``mask`` broadcast.
    """
    turns = (turning >= 0) & (turning < PAIRS)
    cos = tl.load(angle_ptr + turning, mask=mask & turns, other=1.0)
    sin = tl.load(sin_ptr + turning, mask=mask & turns, other=0.0) * SIGN
    turned_even, turned_odd = rotate_pairs(even, odd, cos, sin)
    # What is not turned is copied: infinity times a sine of zero would be NaN
    return tl.where(turns, turned_even, even), tl.where(turns, turned_odd, odd)


@triton.jit(do_not_specialize=["heads"])
def rotate_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    out_ptr: tl.tensor,
    heads: tl.tensor,
    STRIDE_T: tl.constexpr,
    STRIDE_H: tl.constexpr,
    OUT_T: tl.constexpr,
    OUT_H: tl.constexpr,
    FIRST: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    SIGN: tl.constexpr,
    TILE_H: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Channels FIRST .. D - 1 of TILE_H heads of a token; those before the last PAIRS pairs are turned by nothing."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TILE_H + tl.arange(0, TILE_H))[:, None]
    channel = FIRST + tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (channel < D)
    x = tl.load(x_ptr + token * STRIDE_T + head * STRIDE_H + channel, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (TILE_H, BLOCK // 2, 2)))
    turning = (FIRST // 2 + tl.arange(0, BLOCK // 2) - (D // 2 - PAIRS))[None, :]
    angle = token * PAIRS
    even, odd = rotate_tail(
        even, odd, cos_ptr + angle, sin_ptr + angle, turning, turning < PAIRS, PAIRS, SIGN
    )
    turned = tl.reshape(tl.join(even, odd), (TILE_H, BLOCK))
    tl.store(
        out_ptr + token * OUT_T + head * OUT_H + channel,
        narrow(turned, out_ptr.dtype.element_ty),
        mask=inside,
    )


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` (T, ..., D) with its last ``2 * pairs`` channels rotated by the row's angles; contiguous, dtype kept.

    Args:
        x: At most one dimension between T and D; rows and heads may have gaps between them.
        cos, sin: (T, pairs) float32, contiguous.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: bitwise equal to ``apply_rope_ref`` for a multiple of 8 pairs (the reference's processor may fuse the
    others): float32 products and sums, each rounded, one final cast. A pair's bits depend on that pair and its angle
    alone, NaN and infinity included.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, cos, sin, 1.0, out)


def apply_rope_inverse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo ``apply_rope``: the same with the opposite angle; arguments, errors and numerics as there."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch(x, cos, sin, -1.0, out)


def apply_rope_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``apply_rope`` that changes ``x`` and returns it: only the rotated channels are read and written."""
    return _launch(x, cos, sin, 1.0, x)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, sign: float, out: Tensor) -> Tensor:
    x_THD, out_THD = (x.unsqueeze(1), out.unsqueeze(1)) if x.dim() == 2 else (x, out)
    tokens, pairs = cos.shape if cos.dim() == 2 else (-1, -1)
    check_tensor("x", x_THD, FLOATS, (tokens, None, None))
    check_tensor("cos", cos, (torch.float32,), (tokens, pairs), like=x)
    check_tensor("sin", sin, (torch.float32,), (tokens, pairs), like=x)
    check_contiguous("cos", cos)
    check_contiguous("sin", sin)
    heads, channels = x_THD.shape[1:]
    if 2 * pairs > channels or channels % 2:
        raise LaunchRefusedError(f"cannot rotate {2 * pairs} of {channels} channels")
    first = channels - 2 * pairs if out is x else 0
    if tokens and heads and channels > first:
        block = next_power_of_2(channels - first)
        tile = _heads_of_a_program(block, heads)
        rotate_kernel[(tokens, triton.cdiv(heads, tile))](
            x_THD,
            cos,
            sin,
            out_THD,
            heads,
            STRIDE_T=x_THD.stride(0),
            STRIDE_H=x_THD.stride(1),
            OUT_T=out_THD.stride(0),
            OUT_H=out_THD.stride(1),
            FIRST=first,
            D=channels,
            PAIRS=pairs,
            SIGN=sign,
            TILE_H=tile,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=False,  # a fused product and sum rounds once instead of twice
        )
    return out


def _heads_of_a_program(block: int, heads: int) -> int:
    return max(1, min(_TILE // block, next_power_of_2(heads)))


def _entry(name: str, heads: int, *, in_place: bool, sign: float) -> Entry:
    first = LATENT - ROTARY if in_place else 0
    block = LATENT - first
    strides = {"STRIDE_T": heads * LATENT, "STRIDE_H": LATENT, "OUT_T": heads * LATENT, "OUT_H": LATENT}
    return Entry(
        name=name,
        kernel=rotate_kernel,
        signature={
            "x_ptr": "*bf16",
            "cos_ptr": "*fp32",
            "sin_ptr": "*fp32",
            "out_ptr": "*bf16",
            "heads": "i32",
        },
        constexprs=strides
        | {
            "FIRST": first,
            "D": LATENT,
            "PAIRS": ROTARY // 2,
            "SIGN": sign,
            "TILE_H": _heads_of_a_program(block, heads),
            "BLOCK": block,
        },
        fp_fusion=False,
        work=tuple(
            Work(
                f"T={rows}",
                bytes_moved=rows * (4 * heads * block + 4 * ROTARY),
                flops=3 * rows * heads * ROTARY,
            )
            for rows in (8192, 32)
        ),
    )


ENTRIES: Final = (
    _entry("rope 64 heads in place", HEADS, in_place=True, sign=1.0),
    _entry("inverse rope 64 heads", HEADS, in_place=False, sign=-1.0),
)
