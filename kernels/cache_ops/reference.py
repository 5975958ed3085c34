"""Rows of bytes in and out of the page pool, in plain PyTorch. P = pages, B = bytes a page, R = rows, N = bytes a row.

A row is a run of bytes anywhere in a page. The pool is looked at as all its runs of N bytes (overlapping, no copy),
so that one row is one index and one memory copy.
"""

from __future__ import annotations

import torch
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
