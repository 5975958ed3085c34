"""Packed KV entries as even and odd channels in registers, a half of the channels (PIECE 0 or 1) at a time.

Entries are given as 2**-7 of themselves: then an FP4 value is one multiplication of its code's bits, whose exponent
starts at 2**-126, with its scale times 2**119, which does not overflow. Every value is exact in bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from epdserve.kernels.quant.codes import e4m3_value, e8m0_value

SMALLER = tl.constexpr(2.0**-7)  # what entries are multiplied with
LARGER = tl.constexpr(2.0**7)


@triton.jit
def _e2m1_bits(code: tl.tensor) -> tl.tensor:
    """Float32 of an E2M1 code times 2**-126; bits above the lowest four are ignored."""
    return (((code << 22) & 0x01C00000) | ((code << 28) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def window_entries(
    pairs_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    index_ptr: tl.tensor,
    first: tl.tensor,
    window_rows: tl.tensor,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """Window places ``first ..`` of one query row: even and odd channels (KEYS, D / 4) float32, and which exist.

    Args:
        pairs_ptr: Rows as 16-bit words, two E4M3 codes each.
        scales_ptr: The same memory as bytes.
    """
    row_bytes: tl.constexpr = D + D // 32
    place = first + tl.arange(0, KEYS)
    row = tl.load(index_ptr + place, mask=place < WINDOW, other=-1).to(tl.int64)
    exists = (row >= 0) & (row < window_rows)
    group = PIECE * (D // 64) + tl.arange(0, D // 64)
    pair = tl.arange(0, 16)  # of a group
    word = row[:, None, None] * (row_bytes // 2) + group[None, :, None] * 16 + pair[None, None, :]
    code = tl.load(pairs_ptr + word, mask=exists[:, None, None], other=0).to(tl.int32)
    at = scales_ptr + row[:, None] * row_bytes + D + group[None, :]
    scale = e8m0_value(tl.load(at, mask=exists[:, None], other=127).to(tl.int32))
    scale = (scale * SMALLER)[:, :, None]
    even = tl.reshape(e4m3_value(code & 0xFF) * scale, (KEYS, D // 4))
    odd = tl.reshape(e4m3_value((code >> 8) & 0xFF) * scale, (KEYS, D // 4))
    return even, odd, exists


@triton.jit
def main_entries(
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    first: tl.tensor,
    chosen: tl.tensor,
    table_pages: tl.tensor,
    num_pages: tl.tensor,
    page_bytes: tl.tensor,
    values_offset: tl.tensor,
    scales_offset: tl.tensor,
    D: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    PIECE: tl.constexpr,
) -> tl.tensor:
    """Selected entries ``first ..`` of one query row: even and odd channels (KEYS, D / 4) float32, and which exist."""
    place = first + tl.arange(0, KEYS)
    entry = tl.load(entries_ptr + place, mask=place < chosen, other=-1).to(tl.int32)
    slot = entry // PER_PAGE
    page = tl.load(table_ptr + slot, mask=(entry >= 0) & (slot < table_pages), other=-1).to(tl.int64)
    exists = (page >= 0) & (page < num_pages)
    within = entry % PER_PAGE
    start = pages_ptr + page * page_bytes
    group = PIECE * (D // 32) + tl.arange(0, D // 32)
    pair = tl.arange(0, 8)  # of a group
    byte = values_offset + within[:, None, None] * (D // 2) + group[None, :, None] * 8 + pair[None, None, :]
    code = tl.load(start[:, None, None] + byte, mask=exists[:, None, None], other=0).to(tl.int32)
    at = start[:, None] + scales_offset + within[:, None] * (D // 16) + group[None, :]
    scale = e4m3_value(tl.load(at, mask=exists[:, None], other=0).to(tl.int32))
    scale = (scale * (SMALLER * 2.0**126))[:, :, None]
    even = tl.reshape(_e2m1_bits(code) * scale, (KEYS, D // 4))
    odd = tl.reshape(_e2m1_bits(code >> 4) * scale, (KEYS, D // 4))
    return even, odd, exists
