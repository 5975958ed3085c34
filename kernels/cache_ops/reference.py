"""Rows of bytes in and out of the page pool, in plain PyTorch. P = pages, B = bytes a page, R = rows, N = bytes a row.

A row is a run of bytes anywhere in a page. The pool is looked at as all its runs of N bytes (overlapping, no copy),
so that one row is one index and one memory copy.

The ``write_*`` functions are what a GPU does in one pass: rotate, round, pack, and write the bytes into their pages.
"""

from __future__ import annotations

import torch
from epdserve.kernels.quant.reference import quantize_fp4_e4m3_ref, quantize_fp4_e8m0_ref, quantize_fp8_ref
from epdserve.kernels.rope.reference import apply_rope_ref
from torch import Tensor


def _runs(pages_PB: Tensor, nbytes: int) -> Tensor:
    if pages_PB.dtype != torch.uint8 or not pages_PB.is_contiguous():
        raise ValueError(f"the page pool must be contiguous uint8, got {pages_PB.dtype}")
    return pages_PB.view(-1).unfold(0, nbytes, 1)


def gather_rows_ref(pages_PB: Tensor, page: Tensor, byte_offset: Tensor, nbytes: int) -> Tensor:
    """Bytes of each row: (..., nbytes) uint8; rows whose page is negative are zeros.

    Args:
        pages_PB: (P, B) uint8 pool.
        page: Page of each row, any integer shape.
        byte_offset: Start inside the page; broadcasts with ``page``.
        nbytes: Bytes of a row; every row must end inside its page.
    """
    start = page * pages_PB.shape[1] + byte_offset
    missing = start < 0  # an offset is smaller than a page
    rows = _runs(pages_PB, nbytes).index_select(0, start.clamp(min=0).reshape(-1))
    return rows.view(*start.shape, nbytes).masked_fill_(missing.unsqueeze(-1), 0)


def scatter_rows_ref(pages_PB: Tensor, page_R: Tensor, byte_offset_R: Tensor, rows_RN: Tensor) -> None:
    """Write each row's bytes in place; rows whose page is negative are skipped. No two rows may overlap.

    Args:
        pages_PB: (P, B) uint8 pool, changed.
        page_R: (R,) page of each row.
        byte_offset_R: (R,) start inside the page.
        rows_RN: (R, N) uint8.
    """
    start = page_R * pages_PB.shape[1] + byte_offset_R
    keep = start >= 0
    if not bool(keep.all()):
        start, rows_RN = start[keep], rows_RN[keep]
    _runs(pages_PB, rows_RN.shape[1]).index_copy_(0, start, rows_RN)


def write_main_kv_ref(
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
    """Write latents as main KV: rotated, in their dtype, then E2M1 with one E4M3 scale per 16 (spec/backbone.md 4).

    Args:
        pages_PB: (P, B) uint8 pool, changed.
        page_N, entry_N: (N,) page of each row and its place among the page's ``entries``; rows whose page is negative
            are skipped, and no two rows have the same place.
        latent_ND: (N, D) any float dtype.
        cos, sin: (N, pairs) float32.
        entries: Of a page; its parts are arrays of that many.
        values_offset, scales_offset: Where these arrays start in a page.
    """
    values, scales = quantize_fp4_e4m3_ref(apply_rope_ref(latent_ND, cos, sin))
    _write_parts(pages_PB, page_N, entry_N, (values, scales), (values_offset, scales_offset))


def write_index_k_ref(
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
    """As ``write_main_kv``, in the format of indexer keys: E2M1 with one UE8M0 scale per 32 (spec/backbone.md 5)."""
    values, scales = quantize_fp4_e8m0_ref(apply_rope_ref(key_ND, cos, sin))
    _write_parts(pages_PB, page_N, entry_N, (values, scales), (values_offset, scales_offset))


def write_window_kv_ref(
    windows_SWB: Tensor, slot_N: Tensor, place_N: Tensor, kv_ND: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Write rows as window KV: rotated, in their dtype, then E4M3 with one UE8M0 scale per 32 (spec/backbone.md 3).

    Args:
        windows_SWB: (S, W, D + D/32) uint8 rings of one layer, changed.
        slot_N, place_N: (N,) slot of each row and its place in the ring; negative slots are skipped, no place twice.
        kv_ND, cos, sin: As ``write_main_kv``.
    """
    rows_NB = torch.cat(quantize_fp8_ref(apply_rope_ref(kv_ND, cos, sin)), dim=1)
    scatter_rows_ref(windows_SWB.flatten(1), slot_N, place_N * rows_NB.shape[1], rows_NB)


def _write_parts(
    pages_PB: Tensor,
    page_N: Tensor,
    entry_N: Tensor,
    parts: tuple[Tensor, Tensor],
    offsets: tuple[int, int],
) -> None:
    for rows_NB, offset in zip(parts, offsets, strict=True):
        scatter_rows_ref(pages_PB, page_N, offset + entry_N * rows_NB.shape[1], rows_NB)
