"""Narrow number formats in plain PyTorch: E4M3, E2M1 and UE8M0, grouped along the last dimension.

Rounding follows the published rules (spec/backbone.md 2.1, 4, 5): divide by the group's scale, round to nearest even,
keep the sign of a value that becomes zero. Two devices keep the number of tensor operations low on small inputs:

* A scale that is a power of two is found by adding to the float's bits and cutting the mantissa off.
* A value is rounded to a grid of step ``s`` by adding and subtracting ``1.5 * 2**23 * s``: the sum has no room for
  anything finer, and the float unit's own rounding is to nearest even. The step follows from the value's exponent.

K = channels, a multiple of the group; G = groups. Float inputs of any dtype are widened to float32 first.
"""

from __future__ import annotations

from typing import Final

import torch
from epdserve.kernels.quant.tables import (
    e2m1_pair_table,
    e2m1_table,
    e4m3_table,
    e8m0_table,
    look_up,
    nibble_pair_table,
)
from torch import Tensor

GROUP_UE8M0: Final = 32
GROUP_E4M3: Final = 16
WEIGHT_BLOCK: Final = 32

_EXPONENT: Final = 0x7F800000  # bits of a float32's exponent
_MANTISSA: Final = 0x007FFFFF
_MAX_E4M3: Final = 448.0
_MAX_E2M1: Final = 6.0
_FLOOR_FP8: Final = 1e-4  # smallest group maximum that gets a scale of its own
_FLOOR_FP4_E8M0: Final = 6.0 * 2.0**-126
_FLOOR_FP4_E4M3: Final = 6.0 * 2.0**-9
_MAGIC_E4M3: Final = (
    1.5 * 2.0**20
)  # 1.5 * 2**23 times a step of 2**-3: three mantissa bits below the exponent
_MAGIC_E2M1: Final = 1.5 * 2.0**22  # one mantissa bit


def decode_e4m3_ref(codes: Tensor) -> Tensor:
    """Values of E4M3 bytes, float32, same shape; 0x7F and 0xFF are NaN."""
    return look_up(e4m3_table(codes.device), codes)


def decode_e8m0_ref(codes: Tensor) -> Tensor:
    """Values of UE8M0 bytes, float32, same shape: 2 ** (byte - 127); 255 is NaN."""
    return look_up(e8m0_table(codes.device), codes)


def decode_e2m1_ref(codes: Tensor) -> Tensor:
    """Values of E2M1 codes 0..15 (sign in bit 3), float32, same shape."""
    return look_up(e2m1_table(codes.device), codes)


def _widen(x: Tensor, group: int) -> Tensor:
    """Float32 view of ``x`` as (..., G, group)."""
    if x.shape[-1] % group:
        raise ValueError(f"{x.shape[-1]} channels are no multiple of the group of {group}")
    return x.float().unflatten(-1, (-1, group))


def _power_of_two_scale(magnitude: Tensor, floor: float, largest: float) -> Tensor:
    """Bits (int32) of the smallest power of two >= max(amax, floor) * float32(1 / largest), last dim reduced to 1."""
    bits = magnitude.amax(-1, keepdim=True).clamp_(min=floor).mul_(1.0 / largest).view(torch.int32)
    return bits.add_(_MANTISSA).bitwise_and_(_EXPONENT)


def _round_with_magic(x: Tensor, power: Tensor, magic: float) -> Tensor:
    """``x`` rounded to nearest even on the grid that ``power`` (overwritten; sets the exponent) and ``magic`` say."""
    power.view(torch.int32).bitwise_and_(_EXPONENT)
    power.mul_(magic)
    return torch.add(x, power).sub_(power).copysign_(x)


def round_fp8_ref(x: Tensor) -> Tensor:
    """``x`` (..., K) after a round trip through FP8 with one UE8M0 scale per 32; same dtype.

    Numerics: bitwise ``dequantize_fp8(*quantize_fp8(x))``.
    """
    wide = _widen(x, GROUP_UE8M0)
    magnitude = wide.abs()
    scale = _power_of_two_scale(magnitude, _FLOOR_FP8, _MAX_E4M3).view(torch.float32)
    power = torch.maximum(magnitude, scale * 2.0**-6, out=magnitude)  # below 2**-6 the step stops shrinking
    return _round_with_magic(wide, power, _MAGIC_E4M3).flatten(-2).to(x.dtype)


def quantize_fp8_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as E4M3 codes uint8 (..., K) and UE8M0 scales uint8 (..., K/32).

    Raises:
        ValueError: K is no multiple of 32.
    """
    wide = _widen(x, GROUP_UE8M0)
    bits = _power_of_two_scale(wide.abs(), _FLOOR_FP8, _MAX_E4M3)
    codes = (wide / bits.view(torch.float32)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(-2), _scale_bytes(bits)


def dequantize_fp8_ref(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 (..., K) of E4M3 ``codes`` (..., K) and UE8M0 ``scales`` (..., K/32)."""
    return _apply_scales(decode_e4m3_ref(codes), decode_e8m0_ref(scales))


def round_fp4_e8m0_ref(x: Tensor) -> Tensor:
    """``x`` (..., K) after a round trip through E2M1 with one UE8M0 scale per 32; same dtype.

    Numerics: bitwise ``dequantize_fp4_e8m0(*quantize_fp4_e8m0(x))``.
    """
    wide = _widen(x, GROUP_UE8M0)
    magnitude = wide.abs()
    scale = _power_of_two_scale(magnitude, _FLOOR_FP4_E8M0, _MAX_E2M1).view(torch.float32)
    power = torch.maximum(
        magnitude, scale, out=magnitude
    )  # below 1 (in units of the scale) the step stays 1/2
    return _round_with_magic(wide, power, _MAGIC_E2M1).flatten(-2).to(x.dtype)


def quantize_fp4_e8m0_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as packed E2M1 uint8 (..., K/2), low nibble = even channel, and UE8M0 scales uint8 (..., K/32)."""
    wide = _widen(x, GROUP_UE8M0)
    bits = _power_of_two_scale(wide.abs(), _FLOOR_FP4_E8M0, _MAX_E2M1)
    return _pack(_round_e2m1(wide / bits.view(torch.float32))), _scale_bytes(bits)


def dequantize_fp4_e8m0_ref(packed: Tensor, scales: Tensor) -> Tensor:
    """Float32 (..., K) of ``packed`` E2M1 (..., K/2) and UE8M0 ``scales`` (..., K/32)."""
    return _apply_scales(_unpack(packed), decode_e8m0_ref(scales))


def _e4m3_scale(wide: Tensor) -> Tensor:
    """E4M3 scale of each group, kept as float8, last dim reduced to 1; saturates at 448."""
    amax = wide.abs().amax(-1, keepdim=True)
    return amax.clamp_(_FLOOR_FP4_E4M3, _MAX_E2M1 * _MAX_E4M3).div_(_MAX_E2M1).to(torch.float8_e4m3fn)


def round_fp4_e4m3_ref(x: Tensor) -> Tensor:
    """``x`` (..., K) after a round trip through E2M1 with one E4M3 scale per 16; same dtype.

    Numerics: bitwise ``dequantize_fp4_e4m3(*quantize_fp4_e4m3(x))``.
    """
    wide = _widen(x, GROUP_E4M3)
    scale = _e4m3_scale(wide).float()
    return _round_e2m1((wide / scale).clamp_(-_MAX_E2M1, _MAX_E2M1)).mul_(scale).flatten(-2).to(x.dtype)


def quantize_fp4_e4m3_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as packed E2M1 uint8 (..., K/2), low nibble = even channel, and E4M3 scales uint8 (..., K/16)."""
    wide = _widen(x, GROUP_E4M3)
    scale = _e4m3_scale(wide)
    ratio = (wide / scale.float()).clamp_(-_MAX_E2M1, _MAX_E2M1)
    return _pack(_round_e2m1(ratio)), scale.view(torch.uint8).squeeze(-1)


def dequantize_fp4_e4m3_ref(packed: Tensor, scales: Tensor) -> Tensor:
    """Float32 (..., K) of ``packed`` E2M1 (..., K/2) and E4M3 ``scales`` (..., K/16)."""
    return _apply_scales(_unpack(packed), decode_e4m3_ref(scales))


def _round_e2m1(ratio: Tensor) -> Tensor:
    """``ratio`` rounded to the E2M1 grid {0, 0.5, 1, 1.5, 2, 3, 4, 6}, sign kept; at most about 6 in magnitude."""
    return _round_with_magic(ratio, ratio.abs().clamp_(min=1.0), _MAGIC_E2M1)


def _pack(grid: Tensor) -> Tensor:
    """Grid values (..., G, group) as nibbles, two to a byte (..., G*group/2).

    2**-6 moves the grid into the subnormals of E4M3, whose top bits then are the E2M1 code: a cast that does not round.
    """
    bytes_ = grid.mul_(2.0**-6).to(torch.float8_e4m3fn).flatten(-2)
    return look_up(nibble_pair_table(grid.device), bytes_.view(torch.int16).int().add_(2**15))


def _unpack(packed: Tensor) -> Tensor:
    """Nibbles (..., K/2) as float32 (..., K): one look-up gives both values of a byte."""
    return look_up(e2m1_pair_table(packed.device), packed).view(torch.float32)


def _scale_bytes(bits: Tensor) -> Tensor:
    """UE8M0 bytes (..., G) of float32 powers of two given as bits (..., G, 1)."""
    return bits.squeeze(-1).bitwise_right_shift(23).to(torch.uint8)


def _apply_scales(values: Tensor, scale: Tensor) -> Tensor:
    """``values`` (..., K), overwritten, times one scale per group."""
    grouped = values.view(*scale.shape, values.shape[-1] // max(scale.shape[-1], 1))
    return grouped.mul_(scale.unsqueeze(-1)).flatten(-2)


def dequantize_fp8_blocks_ref(weight_NK: Tensor, scale: Tensor) -> Tensor:
    """Float32 (N, K) of an FP8 weight with one UE8M0 scale per 32x32 block (the last blocks may be ragged).

    Args:
        weight_NK: (N, K) float8_e4m3fn or its bytes.
        scale: (ceil(N/32), ceil(K/32)) float8_e8m0fnu or its bytes.
    """
    rows, columns = weight_NK.shape
    expected = (-(-rows // WEIGHT_BLOCK), -(-columns // WEIGHT_BLOCK))
    if tuple(scale.shape) != expected:
        raise ValueError(f"scale of a {rows}x{columns} weight must be {expected}, got {tuple(scale.shape)}")
    by_row = decode_e8m0_ref(scale.view(torch.uint8)).repeat_interleave(WEIGHT_BLOCK, 1)[:, :columns]
    values = decode_e4m3_ref(weight_NK.view(torch.uint8))
    return values.mul_(by_row.repeat_interleave(WEIGHT_BLOCK, 0)[:rows])


def quantize_fp8_blocks_ref(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of ``dequantize_fp8_blocks``: codes uint8 (N, K), scales uint8 (ceil(N/32), ceil(K/32))."""
    rows, columns = weight_NK.shape
    pad = torch.nn.functional.pad(weight_NK.float(), (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    tiles = pad.unflatten(1, (-1, WEIGHT_BLOCK)).unflatten(0, (-1, WEIGHT_BLOCK)).transpose(1, 2)
    bits = _power_of_two_scale(tiles.abs().flatten(2), _FLOOR_FP8, _MAX_E4M3)
    codes = (tiles / bits.view(torch.float32).unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
    codes_NK = codes.transpose(1, 2).flatten(2).flatten(0, 1)[:rows, :columns]
    return codes_NK.contiguous(), _scale_bytes(bits)


def dequantize_mxfp4_ref(weight: Tensor, scale: Tensor) -> Tensor:
    """Float32 (..., N, K) of packed E2M1 ``weight`` (..., N, K/2) int8 or uint8 and UE8M0 ``scale`` (..., N, K/32)."""
    return dequantize_fp4_e8m0_ref(weight.view(torch.uint8), scale.view(torch.uint8))


def quantize_mxfp4_ref(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of ``dequantize_mxfp4``: packed uint8 (..., N, K/2), scales uint8 (..., N, K/32)."""
    return quantize_fp4_e8m0_ref(weight)
