"""Fused RoPE -> round -> FP4 / FP8 pack -> write into pages, on a GPU: a program a few rows.

What the spec does in four steps over memory is one read of a row and one write of its bytes; the values between are
registers. The order of roundings is the spec's: float32 rotation, the row's dtype, then the group's scale.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import INDEX_DIM, LATENT, ROTARY, Entry, Work
from epdserve.kernels.formats import INDEXER_K, MAIN_KV, SWA_KV, EntryFormat
from epdserve.kernels.launch import (
    INDICES,
    LaunchRefusedError,
    check_contiguous,
    check_indices,
    check_multiple,
    check_tensor,
    next_power_of_2,
)
from epdserve.kernels.quant.codes import (
    e2m1_code,
    e4m3_code,
    e4m3_value,
    fp4_e4m3_scale,
    fp4_scale_bits,
    fp8_scale_bits,
    inverse_of_power,
    magnitude_bits,
    narrow,
)
from epdserve.kernels.rope.rotate import rotate_tail
from torch import Tensor

Format = Literal["main", "index", "window"]
_FORMATS: Final[dict[str, EntryFormat]] = {"main": MAIN_KV, "index": INDEXER_K, "window": SWA_KV}
_ROWS: Final = 4  # of a program
_MAX_CHANNELS: Final = 1024
_FLOATS: Final = (torch.bfloat16, torch.float32)


@triton.jit
def group_ratios(
    even: tl.tensor,
    odd: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tl.tuple:
    """Pairs of channels divided by their group's scale, and the scale's byte (ROWS, BLOCK // GROUP)."""
    largest = tl.maximum(magnitude_bits(even), magnitude_bits(odd))
    amax = tl.max(tl.reshape(largest, (ROWS, BLOCK // GROUP, GROUP // 2)), axis=2)
    if FORMAT == "main":
        code = fp4_e4m3_scale(amax)
        scale = spread(e4m3_value(code), ROWS, BLOCK, GROUP)
        even, odd = clamp(tl.div_rn(even, scale), 6.0), clamp(tl.div_rn(odd, scale), 6.0)
    else:
        bits = fp8_scale_bits(amax) if FORMAT == "window" else fp4_scale_bits(amax)
        code = bits >> 23
        inverse = spread(inverse_of_power(bits), ROWS, BLOCK, GROUP)
        even = clamp(even * inverse, 448.0 if FORMAT == "window" else 6.0)
        odd = clamp(odd * inverse, 448.0 if FORMAT == "window" else 6.0)
    return even, odd, code


@triton.jit
def spread(x: tl.tensor, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """A value a group (ROWS, BLOCK // GROUP) as one a pair of channels (ROWS, BLOCK // 2)."""
    wide = tl.broadcast_to(x[:, :, None], (ROWS, BLOCK // GROUP, GROUP // 2))
    return tl.reshape(wide, (ROWS, BLOCK // 2))


@triton.jit
def clamp(x: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Between -LARGEST and LARGEST; NaN stays."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit(do_not_specialize=["rows", "num_pages", "num_entries"])
def pack_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    page_ptr: tl.tensor,
    entry_ptr: tl.tensor,
    rows: tl.tensor,
    num_pages: tl.tensor,
    num_entries: tl.tensor,
    STRIDE_X: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    VALUES_AT: tl.constexpr,
    VALUES_PITCH: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SCALES_PITCH: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    GROUP: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Entries of ROWS rows, each where its page and entry say; rows without a place are skipped."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    page = tl.load(page_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    entry = tl.load(entry_ptr + row, mask=row < rows, other=-1).to(tl.int64)
    live = ((page >= 0) & (page < num_pages) & (entry >= 0) & (entry < num_entries))[:, None]
    base = pages_ptr + (page * PAGE_BYTES)[:, None]
    values = base + VALUES_AT + (entry * VALUES_PITCH)[:, None]
    scales = base + SCALES_AT + (entry * SCALES_PITCH)[:, None]

    channel = tl.arange(0, BLOCK)[None, :]
    pair = tl.arange(0, BLOCK // 2)[None, :]
    x = tl.load(x_ptr + row[:, None] * STRIDE_X + channel, mask=live & (channel < D), other=0.0)
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (ROWS, BLOCK // 2, 2)))
    turning, angle = pair - (D // 2 - PAIRS), row[:, None] * PAIRS
    even, odd = rotate_tail(even, odd, cos_ptr + angle, sin_ptr + angle, turning, live, PAIRS, 1.0)
    even = narrow(even, x_ptr.dtype.element_ty).to(tl.float32)
    odd = narrow(odd, x_ptr.dtype.element_ty).to(tl.float32)

    even, odd, scale = group_ratios(even, odd, ROWS, BLOCK, GROUP, FORMAT)
    if FORMAT == "window":
        code = tl.reshape(tl.join(e4m3_code(even), e4m3_code(odd)), (ROWS, BLOCK))
        tl.store(values + channel, code.to(tl.uint8), mask=live & (channel < D))
    else:
        code = e2m1_code(even) | (e2m1_code(odd) << 4)
        tl.store(values + pair, code.to(tl.uint8), mask=live & (pair < D // 2))
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    tl.store(scales + group, scale.to(tl.uint8), mask=live & (group < D // GROUP))


def write_main_kv(
    pages_PB: Tensor,
    page_N: Tensor,
    entry_N: Tensor,
    latent_ND: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    entries: int,
    values_offset: int,
    scales_offset: int,
) -> None:
    """Rotate, round and pack latents as main KV (E2M1, one E4M3 scale per 16) and write them into their pages.

    Args:
        pages_PB: (P, B) uint8 pool, contiguous, changed.
        page_N, entry_N: (N,) page of each row and its place among the page's ``entries``; rows whose page is negative
            are skipped, and no two rows have the same place.
        latent_ND: (N, D) bfloat16 or float32, D a multiple of the group; rows may have gaps between them.
        cos, sin: (N, pairs) float32 of the last ``2 * pairs`` channels.
        entries: Of a page.
        values_offset, scales_offset: Where the first entry's values and scales lie in a page.

    Raises:
        LaunchRefusedError: A dtype, shape, stride or offset that does not fit; an index out of range, where indices
            are looked at (see ``launch``).

    Numerics: bitwise equal to ``write_main_kv_ref`` for numbers. A group with a NaN gets a NaN scale; its codes mean
    nothing. Rows out of range that were not looked at are skipped. A row depends on itself alone.
    """
    places = (entries, values_offset, scales_offset)
    _write("main", pages_PB, page_N, entry_N, latent_ND, cos, sin, places)


def write_index_k(
    pages_PB: Tensor,
    page_N: Tensor,
    entry_N: Tensor,
    key_ND: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    entries: int,
    values_offset: int,
    scales_offset: int,
) -> None:
    """As ``write_main_kv``, in the format of indexer keys: E2M1, one UE8M0 scale per 32.

    Numerics: bitwise equal to ``write_index_k_ref`` for numbers below 2**100 (the reference's rounding constant
    overflows there). NaN and infinity become 6 times the largest scale, the numbers of their group zero.
    """
    places = (entries, values_offset, scales_offset)
    _write("index", pages_PB, page_N, entry_N, key_ND, cos, sin, places)


def write_window_kv(
    windows_SWB: Tensor, slot_N: Tensor, place_N: Tensor, kv_ND: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate, round and pack rows as window KV (E4M3, one UE8M0 scale per 32) into their slots' rings.

    Args:
        windows_SWB: (S, W, D + D/32) uint8 rings of one layer, contiguous, changed.
        slot_N, place_N: (N,) slot of each row and its place in the ring; negative slots are skipped, no place twice.
        kv_ND, cos, sin: As ``write_main_kv``.

    Raises:
        LaunchRefusedError: As ``write_main_kv``.

    Numerics: bitwise equal to ``write_window_kv_ref``. An infinity becomes 448 times the largest scale, a NaN stays
    one; the numbers of their group become zero.
    """
    check_tensor("windows_SWB", windows_SWB, (torch.uint8,), (None, None, None))
    check_contiguous("windows_SWB", windows_SWB)
    window, channels = windows_SWB.shape[1], kv_ND.shape[-1]
    if windows_SWB.shape[2] != channels + channels // SWA_KV.channels_per_scale:
        raise LaunchRefusedError(f"rows of {windows_SWB.shape[2]} bytes do not hold {channels} channels")
    _write("window", windows_SWB.flatten(1), slot_N, place_N, kv_ND, cos, sin, (window, 0, channels))


def _write(
    name: Format,
    pages_PB: Tensor,
    page_N: Tensor,
    entry_N: Tensor,
    x_ND: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: tuple[int, int, int],
) -> None:
    _check(name, pages_PB, page_N, entry_N, x_ND, cos, sin, places)
    rows, channels = x_ND.shape
    if rows:
        pack_kernel[(triton.cdiv(rows, _ROWS),)](
            x_ND,
            cos,
            sin,
            pages_PB,
            page_N,
            entry_N,
            rows,
            pages_PB.shape[0],
            places[0],
            STRIDE_X=x_ND.stride(0),
            **_constexprs(name, pages_PB.shape[1], channels, cos.shape[1], places),
            num_warps=4,
            enable_fp_fusion=False,  # as rope
        )


def _constexprs(
    name: Format, page_bytes: int, channels: int, pairs: int, places: tuple[int, int, int]
) -> dict[str, int | str]:
    form, (_, values_at, scales_at) = _FORMATS[name], places
    row_bytes = form.entry_bytes(channels)
    return {
        "PAGE_BYTES": page_bytes,
        "VALUES_AT": values_at,
        "VALUES_PITCH": row_bytes if name == "window" else form.value_bytes(channels),
        "SCALES_AT": scales_at,
        "SCALES_PITCH": row_bytes if name == "window" else form.scale_bytes(channels),
        "D": channels,
        "PAIRS": pairs,
        "GROUP": form.channels_per_scale,
        "FORMAT": name,
        "ROWS": _ROWS,
        "BLOCK": next_power_of_2(channels),
    }


def _check(
    name: Format,
    pages_PB: Tensor,
    page_N: Tensor,
    entry_N: Tensor,
    x_ND: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: tuple[int, int, int],
) -> None:
    check_tensor("pages", pages_PB, (torch.uint8,), (None, None))
    check_contiguous("pages", pages_PB)
    check_tensor("rows", x_ND, _FLOATS, (None, None), like=pages_PB)
    rows, channels = x_ND.shape
    form, (entries, values_at, scales_at) = _FORMATS[name], places
    check_multiple("channels", channels, form.channels_per_scale)
    if channels > _MAX_CHANNELS or 2 * cos.shape[-1] > channels:
        raise LaunchRefusedError(
            f"{channels} channels, {2 * cos.shape[-1]} of them rotated: at most {_MAX_CHANNELS} are taken"
        )
    for label, angles in (("cos", cos), ("sin", sin)):
        check_tensor(label, angles, (torch.float32,), (rows, cos.shape[-1]), like=pages_PB)
        check_contiguous(label, angles)
    last = max(form.value_bytes(channels), form.entry_bytes(channels) if name == "window" else 0)
    ends = (values_at + entries * last, scales_at + entries * form.scale_bytes(channels))
    if min(places) < 0 or (name != "window" and max(ends) > pages_PB.shape[1]):
        raise LaunchRefusedError(
            f"{entries} entries at {values_at} and {scales_at} end at {max(ends)} of a page of {pages_PB.shape[1]}"
        )
    for label, index, limit, least in (
        ("page", page_N, pages_PB.shape[0], -(2**62)),
        ("entry", entry_N, entries, 0),
    ):
        check_tensor(label, index, INDICES, (rows,), like=pages_PB)
        check_indices(label, index, limit=limit, least=least)


def _entry(name: Format, channels: int, places: tuple[int, int, int], page_bytes: int) -> Entry:
    form = _FORMATS[name]
    pointers = {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "pages_ptr": "*u8"}
    counts = {
        "page_ptr": "*i64",
        "entry_ptr": "*i64",
        "rows": "i32",
        "num_pages": "i32",
        "num_entries": "i32",
    }
    row_bytes = 2 * channels + 4 * ROTARY + 16 + form.entry_bytes(channels)
    return Entry(
        name=f"pack {name}",
        kernel=pack_kernel,
        signature=pointers | counts,
        constexprs=_constexprs(name, page_bytes, channels, ROTARY // 2, places) | {"STRIDE_X": channels},
        fp_fusion=False,
        work=tuple(
            Work(f"N={rows}", bytes_moved=rows * row_bytes, flops=rows * channels * 8) for rows in (8192, 32)
        ),
    )


# A page of 128 tokens: the plane of ratio 1 after three of ratio 2 (model/kv_layout.py)
_FIRST: Final = 3 * 64 * (288 + 68)
ENTRIES: Final = (
    _entry("main", LATENT, (128, _FIRST, _FIRST + 128 * 256), 114_688),
    _entry("index", INDEX_DIM, (128, _FIRST + 128 * 288, _FIRST + 128 * (288 + 64)), 114_688),
    _entry("window", LATENT, (128, 0, LATENT), 128 * 528),
)
