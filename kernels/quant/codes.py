"""E4M3, E2M1 and UE8M0 inside Triton kernels: integer arithmetic on the bits of float32, exact on every device.

No cast to a narrow float is used: Triton's interpreter rounds some of them wrongly and not every GPU has them. A
division or multiplication by a power of two does not round, and a float is moved from one exponent range to another by
one such multiplication: the bits of an E4M3 number, shifted into a float32, are its value times 2**-120, subnormals
included. All functions take tensors of any shape; "code" is an int32 that holds the byte or nibble.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ABS = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)
_EXPONENT = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)

# What to add to a maximum's bits so that its exponent becomes the scale's; see ``_to_scale`` in reference.py
_TO_FP8_SCALE = tl.constexpr(0x7FFFFF - 0x600000 - (8 << 23))  # largest 448 = 1.75 * 2**8
_TO_FP4_SCALE = tl.constexpr(0x7FFFFF - 0x400000 - (2 << 23))  # largest 6 = 1.5 * 2**2
_FLOOR_FP8 = tl.constexpr(0x38D1B717)  # bits of 1e-4
_FLOOR_FP4_E8M0 = tl.constexpr(0x01C00000)  # 6 * 2**-126
_FLOOR_FP4_E4M3 = tl.constexpr(0x3C400000)  # 6 * 2**-9


@triton.jit
def magnitude_bits(x: tl.tensor) -> tl.tensor:
    """Bits of |x|. They order as the values do, infinity above all numbers and NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & _ABS


@triton.jit
def narrow(x: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Float32 as TYPE, rounded to nearest even; NaN as bfloat16 is positive and quiet."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), _NAN)
        narrowed = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = x.to(TYPE)
    return narrowed


@triton.jit
def _rounded(x: tl.tensor, power_bits: tl.tensor, magic: tl.constexpr) -> tl.tensor:
    """|x| rounded to nearest even on the grid that the exponent in ``power_bits`` and ``magic`` say."""
    large = (power_bits & _EXPONENT).to(tl.float32, bitcast=True) * magic
    return (magnitude_bits(x).to(tl.float32, bitcast=True) + large) - large


@triton.jit
def e4m3_code(x: tl.tensor) -> tl.tensor:
    """Nearest E4M3 code of |x| <= 448; NaN is 0x7F with the sign of x."""
    bits = x.to(tl.int32, bitcast=True)
    grid = _rounded(
        x, tl.maximum(bits & _ABS, 0x3C800000), 1.5 * 2.0**20
    )  # at least 2**-6, the smallest normal
    normal = (grid.to(tl.int32, bitcast=True) >> 20) - (120 << 3)
    code = tl.where(grid < 2.0**-6, (grid * 512.0).to(tl.int32), normal)
    code = tl.where(grid == grid, code, 0x7F)
    return code | ((bits & _SIGN) >> 24 & 0x80)


@triton.jit
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """Float32 of an E4M3 code."""
    value = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 2.0**120
    bits = tl.where((code & 0x7F) == 0x7F, _NAN, value.to(tl.int32, bitcast=True)) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_code(x: tl.tensor) -> tl.tensor:
    """Nearest E2M1 code of |x| <= 6; NaN is 7 with the sign of x."""
    bits = x.to(tl.int32, bitcast=True)
    grid = _rounded(x, tl.maximum(bits & _ABS, 0x3F800000), 1.5 * 2.0**22)  # at least 1, the smallest normal
    normal = (grid.to(tl.int32, bitcast=True) >> 22) - (126 << 1)
    code = tl.where(grid < 1.0, (grid * 2.0).to(tl.int32), normal)
    code = tl.where(grid == grid, code, 7)
    return code | ((bits & _SIGN) >> 28 & 8)


@triton.jit
def e2m1_value(code: tl.tensor) -> tl.tensor:
    """Float32 of an E2M1 code; bits above the lowest four are ignored."""
    value = ((code & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
    return (value.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(code: tl.tensor) -> tl.tensor:
    """Float32 of a UE8M0 code: 2**(code - 127), NaN for 255."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, _NAN, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of_power(scale_bits: tl.tensor) -> tl.tensor:
    """Reciprocal of a power of two given as bits, 2**-126 .. 2**126: multiplying by it divides and does not round."""
    return (0x7F000000 - scale_bits).to(tl.float32, bitcast=True)


@triton.jit
def fp8_scale_bits(amax_bits: tl.tensor) -> tl.tensor:
    """Bits of the power of two that brings a group's maximum below 448; >> 23 is its UE8M0 code."""
    return (tl.maximum(amax_bits, _FLOOR_FP8) + _TO_FP8_SCALE) & _EXPONENT


@triton.jit
def fp4_scale_bits(amax_bits: tl.tensor) -> tl.tensor:
    """The same for E2M1, below 6."""
    return (tl.maximum(amax_bits, _FLOOR_FP4_E8M0) + _TO_FP4_SCALE) & _EXPONENT


@triton.jit
def fp4_e4m3_scale(amax_bits: tl.tensor) -> tl.tensor:
    """E4M3 code of a group's scale: a sixth of its maximum, rounded; at most 448, NaN if a value is NaN."""
    amax = tl.maximum(amax_bits, _FLOOR_FP4_E4M3)
    bounded = tl.where(amax <= _EXPONENT, tl.minimum(amax, 0x45280000), amax)  # 6 * 448 = 2688
    return e4m3_code(tl.div_rn(bounded.to(tl.float32, bitcast=True), 6.0))
