"""Rows of bytes in and out of the page pool on a GPU: a program a row."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.catalogue import Entry, Work
from epdserve.kernels.launch import INDICES, LaunchRefusedError, check_contiguous, check_indices, check_tensor
from epdserve.kernels.launch import next_power_of_2 as _power
from torch import Tensor

_BLOCK: Final = 4096  # bytes at a time


@triton.jit
def copy_run(
    source_ptr: tl.tensor,
    source: tl.tensor,
    target_ptr: tl.tensor,
    target: tl.tensor,
    NBYTES: tl.constexpr,
    there: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy NBYTES from ``source`` of one pointer to ``target`` of another; zeros beyond the first ``there`` of them.

    Sixteen bytes at a time where both ends allow it: those of the page layout do.
    """
    if (NBYTES % 16 == 0) & (source % 16 == 0) & (target % 16 == 0):
        from_ptr = (source_ptr + tl.multiple_of(source, 16)).to(tl.pointer_type(tl.int32))
        to_ptr = (target_ptr + tl.multiple_of(target, 16)).to(tl.pointer_type(tl.int32))
        for start in range(0, NBYTES // 4, BLOCK // 4):
            word = start + tl.arange(0, BLOCK // 4)
            inside = word < NBYTES // 4
            tl.store(
                to_ptr + word,
                tl.load(from_ptr + word, mask=inside & (word < there // 4), other=0),
                mask=inside,
            )
    else:
        for start in range(0, NBYTES, BLOCK):
            byte = start + tl.arange(0, BLOCK)
            inside = byte < NBYTES
            data = tl.load(source_ptr + source + byte, mask=inside & (byte < there), other=0)
            tl.store(target_ptr + target + byte, data, mask=inside)


@triton.jit(do_not_specialize=["num_pages"])
def gather_kernel(
    pages_ptr: tl.tensor,
    page_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pages: tl.tensor,
    PAGE_BYTES: tl.constexpr,
    NBYTES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Row of this program: NBYTES at its offset of its page, or zeros if there is no such page or run."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(page_ptr + row).to(tl.int64)
    offset = tl.load(offset_ptr + row).to(tl.int64)
    keep = (page >= 0) & (page < num_pages) & (offset >= 0) & (offset <= PAGE_BYTES - NBYTES)
    source = tl.where(keep, page * PAGE_BYTES + offset, 0)
    copy_run(pages_ptr, source, out_ptr, row * NBYTES, NBYTES, tl.where(keep, NBYTES, 0), BLOCK)


@triton.jit(do_not_specialize=["num_pages"])
def scatter_kernel(
    pages_ptr: tl.tensor,
    page_ptr: tl.tensor,
    offset_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_pages: tl.tensor,
    PAGE_BYTES: tl.constexpr,
    NBYTES: tl.constexpr,
    STRIDE_R: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The opposite; a row without a page is skipped."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(page_ptr + row).to(tl.int64)
    offset = tl.load(offset_ptr + row).to(tl.int64)
    if (page >= 0) & (page < num_pages) & (offset >= 0) & (offset <= PAGE_BYTES - NBYTES):
        copy_run(rows_ptr, row * STRIDE_R, pages_ptr, page * PAGE_BYTES + offset, NBYTES, NBYTES, BLOCK)


def gather_rows(pages_PB: Tensor, page: Tensor, byte_offset: Tensor, nbytes: int) -> Tensor:
    """Bytes of each row: (..., nbytes) uint8; rows whose page is negative are zeros.

    Args:
        pages_PB: (P, B) uint8 pool, contiguous.
        page: Page of each row, any shape, int32 or int64.
        byte_offset: Start inside the page; broadcasts with ``page``.
        nbytes: Bytes of a row; every row must end inside its page.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take; an index out of range, where
            indices are looked at (see ``launch``).

    Numerics: bytes are moved. A row out of range that was not looked at gives zeros.
    """
    shape = torch.broadcast_shapes(page.shape, byte_offset.shape)
    page_R, offset_R = (index.expand(shape).reshape(-1) for index in (page, byte_offset))
    _check(pages_PB, page_R, offset_R, nbytes)
    out = torch.empty(*shape, nbytes, dtype=torch.uint8, device=pages_PB.device)
    if out.numel():
        block = min(_BLOCK, _power(nbytes))
        gather_kernel[(page_R.numel(),)](
            pages_PB,
            page_R,
            offset_R,
            out,
            pages_PB.shape[0],
            PAGE_BYTES=pages_PB.shape[1],
            NBYTES=nbytes,
            BLOCK=max(block, 16),
            num_warps=_warps(nbytes),
        )
    return out


def scatter_rows(pages_PB: Tensor, page_R: Tensor, byte_offset_R: Tensor, rows_RN: Tensor) -> None:
    """Write each row's bytes in place; rows whose page is negative are skipped. No two rows may overlap.

    Args:
        pages_PB: (P, B) uint8 pool, contiguous, changed.
        page_R, byte_offset_R: (R,) int32 or int64; the offset is the start inside the page.
        rows_RN: (R, N) uint8; rows may have gaps between them.

    Raises:
        LaunchRefusedError: As ``gather_rows``.

    Numerics: bytes are moved. A row out of range that was not looked at is skipped.
    """
    check_tensor("rows_RN", rows_RN, (torch.uint8,), (page_R.numel(), None), like=pages_PB)
    nbytes = rows_RN.shape[1]
    _check(pages_PB, page_R, byte_offset_R, nbytes)
    if rows_RN.numel():
        block = min(_BLOCK, _power(nbytes))
        scatter_kernel[(page_R.numel(),)](
            pages_PB,
            page_R,
            byte_offset_R,
            rows_RN,
            pages_PB.shape[0],
            PAGE_BYTES=pages_PB.shape[1],
            NBYTES=nbytes,
            STRIDE_R=rows_RN.stride(0),
            BLOCK=max(block, 16),
            num_warps=_warps(nbytes),
        )


def _check(pages_PB: Tensor, page_R: Tensor, offset_R: Tensor, nbytes: int) -> None:
    check_tensor("pages_PB", pages_PB, (torch.uint8,), (None, None))
    check_contiguous("pages_PB", pages_PB)
    check_tensor("page", page_R, INDICES, (None,), like=pages_PB)
    check_tensor("byte_offset", offset_R, INDICES, (page_R.numel(),), like=pages_PB)
    if nbytes > pages_PB.shape[1]:
        raise LaunchRefusedError(f"a row of {nbytes} bytes does not fit a page of {pages_PB.shape[1]}")
    check_indices("page", page_R, limit=pages_PB.shape[0], least=-(2**62))
    check_indices("byte_offset", offset_R, limit=pages_PB.shape[1] - nbytes + 1)


def _warps(nbytes: int) -> int:
    return 1 if nbytes <= 1024 else 4


_PAGE_BYTES: Final = 114_688  # of 128 tokens (model/kv_layout.py)


def _entry(name: str, nbytes: int, rows: int, *, gather: bool) -> Entry:
    data = {"out_ptr": "*u8"} if gather else {"rows_ptr": "*u8"}
    return Entry(
        name=name,
        kernel=gather_kernel if gather else scatter_kernel,
        signature={"pages_ptr": "*u8", "page_ptr": "*i64", "offset_ptr": "*i64", "num_pages": "i32"} | data,
        constexprs={"PAGE_BYTES": _PAGE_BYTES, "NBYTES": nbytes, "BLOCK": min(_BLOCK, _power(nbytes))}
        | ({} if gather else {"STRIDE_R": nbytes}),
        num_warps=_warps(nbytes),
        work=(Work(f"{rows} rows", bytes_moved=rows * (2 * nbytes + 16)),),
    )


ENTRIES: Final = (
    _entry("gather rows of 256 bytes", 256, 65_536, gather=True),
    _entry("gather pages", _PAGE_BYTES, 1024, gather=True),
    _entry("scatter rows of 256 bytes", 256, 65_536, gather=False),
    _entry("scatter pages", _PAGE_BYTES, 1024, gather=False),
)
