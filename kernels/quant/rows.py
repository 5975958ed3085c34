"""Activations rounded to FP8 or FP4 on a GPU: what products and the indexer take (spec/backbone.md 2.1, 5)."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import HIDDEN, INDEX_DIM, INDEX_HEADS, Entry, Work
from epdserve.kernels.launch import FLOATS, check_multiple, check_tensor
from epdserve.kernels.quant.codes import e2m1_code, e4m3_code, fp4_scale_bits, fp8_scale_bits, magnitude_bits
from torch import Tensor

_GROUPS: Final = 32  # of 32 channels, of a program


@triton.jit
def quantize_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    stride_x: tl.tensor,
    groups: tl.tensor,
    PACKED: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """GROUPS groups of one row: their UE8M0 scales, and E4M3 codes or (PACKED) E2M1 codes, two to a byte."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < groups)[:, None]
    source = x_ptr + row * stride_x + group[:, None] * 32
    if PACKED:
        pair = tl.arange(0, 16)[None, :]
        even = tl.load(source + 2 * pair, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(source + 2 * pair + 1, mask=inside, other=0.0).to(tl.float32)
        scale = fp4_scale_bits(tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)), axis=1))
        power = tl.broadcast_to(scale.to(tl.float32, bitcast=True)[:, None], (GROUPS, 16))
        code = e2m1_code(tl.div_rn(even, power)) | (e2m1_code(tl.div_rn(odd, power)) << 4)
        target = codes_ptr + row * groups * 16 + group[:, None] * 16 + pair
    else:
        channel = tl.arange(0, 32)[None, :]
        x = tl.load(source + channel, mask=inside, other=0.0).to(tl.float32)
        scale = fp8_scale_bits(tl.max(magnitude_bits(x), axis=1))
        power = tl.broadcast_to(scale.to(tl.float32, bitcast=True)[:, None], (GROUPS, 32))
        code = e4m3_code(tl.div_rn(x, power))
        target = codes_ptr + row * groups * 32 + group[:, None] * 32 + channel
    tl.store(target, code.to(tl.uint8), mask=inside)
    tl.store(scales_ptr + row * groups + group, (scale >> 23).to(tl.uint8), mask=group < groups)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as E4M3 codes uint8 (..., K) and UE8M0 scales uint8 (..., K/32).

    Args:
        x: Any float dtype; K a multiple of 32.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: bitwise equal to ``quantize_fp8_ref`` for numbers. A NaN or infinity makes its group's scale huge; that
    value stays NaN, or the largest, and the group's numbers become zero. A row depends on itself alone.
    """
    return _launch(x, packed=False)


def quantize_fp4_e8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as packed E2M1 uint8 (..., K/2), low nibble = even channel, and UE8M0 scales uint8 (..., K/32).

    Arguments, errors and numerics as ``quantize_fp8``, equal to ``quantize_fp4_e8m0_ref``.
    """
    return _launch(x, packed=True)


def _launch(x: Tensor, *, packed: bool) -> tuple[Tensor, Tensor]:
    rows_TK = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    check_tensor("x", rows_TK, FLOATS, (None, None))
    rows, channels = rows_TK.shape
    check_multiple("channels", channels, 32)
    groups = channels // 32
    codes = torch.empty(
        *x.shape[:-1], channels // 2 if packed else channels, dtype=torch.uint8, device=x.device
    )
    scales = torch.empty(*x.shape[:-1], groups, dtype=torch.uint8, device=x.device)
    if rows:
        quantize_kernel[(rows, triton.cdiv(groups, _GROUPS))](
            rows_TK, codes, scales, rows_TK.stride(0), groups, PACKED=packed, GROUPS=_GROUPS, num_warps=4
        )
    return codes, scales


def _entry(name: str, channels: int, *, packed: bool) -> Entry:
    moved = channels * (2.5 if packed else 3) + channels / 32
    return Entry(
        name=name,
        kernel=quantize_kernel,
        signature={
            "x_ptr": "*bf16",
            "codes_ptr": "*u8",
            "scales_ptr": "*u8",
            "stride_x": "i32:16",
            "groups": "i32:16",
        },
        constexprs={"PACKED": packed, "GROUPS": _GROUPS},
        work=tuple(Work(f"T={rows}", int(rows * moved), rows * channels * 6) for rows in (8192, 32)),
    )


ENTRIES: Final = (
    _entry("quantize FP8", HIDDEN, packed=False),
    _entry("quantize FP4", INDEX_HEADS * INDEX_DIM, packed=True),
)
