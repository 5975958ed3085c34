"""Narrow number formats in plain PyTorch: E4M3, E2M1 and UE8M0, grouped along the last dimension.

Rounding follows the published rules (spec/backbone.md 2.1, 4, 5): divide by the group's scale, round to nearest even,
keep the sign of a value that becomes zero. Two devices keep the number of tensor operations low, which is what small
inputs pay for:

* A power-of-two scale is found in the bits of the group's maximum: adding what the format's largest mantissa lacks to
  a full one carries into the exponent exactly when one binade more is needed.
* A value is rounded to a grid of step ``s`` by adding and subtracting ``1.5 * 2**23 * s``: the sum has no room for
  anything finer, and the float unit itself rounds to nearest even. The step follows from the value's exponent, so
  nothing is divided by a power-of-two scale and multiplied back.

K = channels, a multiple of the group; G = groups. Float inputs of any dtype are widened to float32 first.
"""

from __future__ import annotations

import struct
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
)  # times 2**exponent: 1.5 * 2**23 times a step three bits below the leading one
_MAGIC_E2M1: Final = 1.5 * 2.0**22  # one bit below


def _to_scale(largest: float, shift: int = 0) -> int:
    """What to add to the bits of a group's maximum so that its exponent becomes that of ``scale * 2**shift``.

    The scale is the smallest power of two with ``largest * scale >= maximum``. It equals the published
    2**ceil(log2(maximum * float32(1 / largest))) for every float32 maximum (tested over all mantissas).
    """
    (bits,) = struct.unpack("<i", struct.pack("<f", largest))
    exponent = (bits >> 23) - 127
    return int(_MANTISSA - (bits & _MANTISSA) - ((exponent - shift) << 23))


_TO_FP8_SCALE: Final = _to_scale(_MAX_E4M3)
_TO_FP8_SMALLEST: Final = _to_scale(_MAX_E4M3, shift=-6)  # 2**-6 is E4M3's smallest normal number
_TO_FP4_SCALE: Final = _to_scale(_MAX_E2M1)  # 1 is E2M1's smallest normal number: no shift


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
    """``x`` (..., K) as float32 (..., G, group)."""
    groups, rest = divmod(x.shape[-1], group)
    if rest:
        raise ValueError(f"{x.shape[-1]} channels are no multiple of the group of {group}")
    return x.float().contiguous().view(*x.shape[:-1], groups, group)


def _scale_bits(magnitude: Tensor, floor: float, to_scale: int) -> Tensor:
    """Int32 (..., G, 1) of each group's maximum moved to its scale's exponent; the mantissa is of no meaning."""
    return magnitude.amax(-1, keepdim=True).clamp_(min=floor).view(torch.int32).add_(to_scale)


def _round_with_magic(x: Tensor, power: Tensor, magic: float) -> Tensor:
    """``x`` rounded to nearest even on the grid that the exponent of ``power`` (overwritten) and ``magic`` say."""
    power.view(torch.int32).bitwise_and_(_EXPONENT)
    power.mul_(magic)
    return torch.add(x, power).sub_(power).copysign_(x)


def _round_fp8(wide: Tensor) -> Tensor:
    magnitude = wide.abs()
    smallest = _scale_bits(magnitude, _FLOOR_FP8, _TO_FP8_SMALLEST).view(torch.float32)
    return _round_with_magic(wide, torch.maximum(magnitude, smallest, out=magnitude), _MAGIC_E4M3)


def round_fp8_ref(x: Tensor) -> Tensor:
    """``x`` (..., K) after a round trip through FP8 with one UE8M0 scale per 32; same dtype.

    Numerics: bitwise ``dequantize_fp8(*quantize_fp8(x))``.
    """
    return _round_fp8(_widen(x, GROUP_UE8M0)).view(x.shape).to(x.dtype)


def quantize_fp8_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as E4M3 codes uint8 (..., K) and UE8M0 scales uint8 (..., K/32).

    Raises:
        ValueError: K is no multiple of 32.
    """
    wide = _widen(x, GROUP_UE8M0)
    bits = _scale_bits(wide.abs(), _FLOOR_FP8, _TO_FP8_SCALE).bitwise_and_(_EXPONENT)
    codes = (wide / bits.view(torch.float32)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(x.shape), _scale_bytes(bits)


def dequantize_fp8_ref(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 (..., K) of E4M3 ``codes`` (..., K) and UE8M0 ``scales`` (..., K/32)."""
    return _apply_scales(decode_e4m3_ref(codes), decode_e8m0_ref(scales))


def _round_fp4_e8m0(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded values and the bits (int32, exponent only) of their groups' scales."""
    magnitude = wide.abs()
    bits = _scale_bits(magnitude, _FLOOR_FP4_E8M0, _TO_FP4_SCALE).bitwise_and_(_EXPONENT)
    power = torch.maximum(magnitude, bits.view(torch.float32), out=magnitude)
    return _round_with_magic(wide, power, _MAGIC_E2M1), bits


def round_fp4_e8m0_ref(x: Tensor) -> Tensor:
    """``x`` (..., K) after a round trip through E2M1 with one UE8M0 scale per 32; same dtype.

    Numerics: bitwise ``dequantize_fp4_e8m0(*quantize_fp4_e8m0(x))``.
    """
    return _round_fp4_e8m0(_widen(x, GROUP_UE8M0))[0].view(x.shape).to(x.dtype)


def quantize_fp4_e8m0_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as packed E2M1 uint8 (..., K/2), low nibble = even channel, and UE8M0 scales uint8 (..., K/32)."""
    rounded, bits = _round_fp4_e8m0(_widen(x, GROUP_UE8M0))
    return _pack(rounded.div_(bits.view(torch.float32)), x.shape), _scale_bytes(bits)


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
    return _round_e2m1((wide / scale).clamp_(-_MAX_E2M1, _MAX_E2M1)).mul_(scale).view(x.shape).to(x.dtype)


def quantize_fp4_e4m3_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` (..., K) as packed E2M1 uint8 (..., K/2), low nibble = even channel, and E4M3 scales uint8 (..., K/16)."""
    wide = _widen(x, GROUP_E4M3)
    scale = _e4m3_scale(wide)
    ratio = (wide / scale.float()).clamp_(-_MAX_E2M1, _MAX_E2M1)
    return _pack(_round_e2m1(ratio), x.shape), scale.view(torch.uint8).squeeze(-1)


def dequantize_fp4_e4m3_ref(packed: Tensor, scales: Tensor) -> Tensor:
    """Float32 (..., K) of ``packed`` E2M1 (..., K/2) and E4M3 ``scales`` (..., K/16)."""
    return _apply_scales(_unpack(packed), decode_e4m3_ref(scales))


def _round_e2m1(ratio: Tensor) -> Tensor:
    """``ratio`` rounded to the E2M1 grid {0, 0.5, 1, 1.5, 2, 3, 4, 6}, sign kept; at most about 6 in magnitude."""
    return _round_with_magic(ratio, ratio.abs().clamp_(min=1.0), _MAGIC_E2M1)


def _pack(grid: Tensor, shape: torch.Size) -> Tensor:
    """Grid values of ``shape`` (..., K), overwritten, as nibbles, two to a byte (..., K/2).

    2**-6 moves the grid into the subnormals of E4M3, whose top bits then are the E2M1 code: a cast that does not round.
    """
    pairs = grid.mul_(2.0**-6).to(torch.float8_e4m3fn).view(shape).view(torch.int16)
    return look_up(nibble_pair_table(grid.device), pairs.int().add_(2**15))


def _unpack(packed: Tensor) -> Tensor:
    """Nibbles (..., K/2) as float32 (..., K): one look-up gives both values of a byte."""
    return look_up(e2m1_pair_table(packed.device), packed).view(torch.float32)


def _scale_bytes(bits: Tensor) -> Tensor:
    """UE8M0 bytes (..., G) of float32 powers of two given as bits (..., G, 1)."""
    return bits.squeeze(-1).bitwise_right_shift(23).to(torch.uint8)


def _apply_scales(values: Tensor, scale: Tensor) -> Tensor:
    """``values`` (..., K), contiguous, overwritten, times one scale per group."""
    grouped = values.view(*scale.shape, values.shape[-1] // max(scale.shape[-1], 1))
    return grouped.mul_(scale.unsqueeze(-1)).view(values.shape)


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
    padded = torch.constant_pad_nd(weight_NK.float(), (0, -columns % WEIGHT_BLOCK, 0, -rows % WEIGHT_BLOCK))
    down, across = padded.shape[0] // WEIGHT_BLOCK, padded.shape[1] // WEIGHT_BLOCK
    tiles = padded.view(down, WEIGHT_BLOCK, across, WEIGHT_BLOCK)
    largest = tiles.abs().amax(1)  # (down, across, 32): the group maximum is taken over the last dimension
    bits = _scale_bits(largest, _FLOOR_FP8, _TO_FP8_SCALE).bitwise_and_(_EXPONENT)
    codes = (tiles / bits.view(torch.float32).unsqueeze(1)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), _scale_bytes(bits)


def dequantize_mxfp4_ref(weight: Tensor, scale: Tensor) -> Tensor:
    """Float32 (..., N, K) of packed E2M1 ``weight`` (..., N, K/2) int8 or uint8 and UE8M0 ``scale`` (..., N, K/32)."""
    return dequantize_fp4_e8m0_ref(weight.view(torch.uint8), scale.view(torch.uint8))


def quantize_mxfp4_ref(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of ``dequantize_mxfp4``: packed uint8 (..., N, K/2), scales uint8 (..., N, K/32)."""
    return quantize_fp4_e8m0_ref(weight)
