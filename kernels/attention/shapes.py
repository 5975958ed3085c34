"""Ahead-of-time compilations of sparse attention, with the bytes and FLOPs of the released model."""

from __future__ import annotations

from typing import Final

from epdserve.kernels.attention.kernels import all_splits_kernel, merge_kernel, one_split_kernel
from epdserve.kernels.attention.sparse import MERGED_HEADS, SPLIT_KEYS, WARPS
from epdserve.kernels.catalogue import HEADS, LATENT, ROTARY, Entry, Work

_WINDOW: Final = 128
_CHOSEN: Final = 512
_KEYS: Final = _WINDOW + _CHOSEN
_SPLITS: Final = _KEYS // SPLIT_KEYS
_ENTRY_BYTES: Final = _WINDOW * LATENT * 33 // 32 + _CHOSEN * LATENT * 9 // 16
_POINTERS: Final = {
    "q_ptr": "*bf16",
    "rows_ptr": "*i16",
    "scales_ptr": "*u8",
    "window_ptr": "*i64",
    "pages_ptr": "*u8",
    "table_ptr": "*i64",
    "segment_ptr": "*i64",
    "chosen_ptr": "*i64",
}
_ENDS: Final = {"sink_ptr": "*fp32", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*bf16"}
_PARTS: Final = {"part_ptr": "*fp32", "stat_ptr": "*fp32"}
_SIZES: Final = {
    "window_rows": "i32:16",
    "stride_window": "i32:16",
    "chosen": "i32:16",
    "stride_chosen": "i32:16",
    "stride_table": "i32:16",
    "table_pages": "i32:16",
    "num_pages": "i32",
    "page_bytes": "i32:16",
    "values_offset": "i32:16",
    "scales_offset": "i32:16",
    "scale": "fp32",
    "splits": "i32",
}
_SHAPE: Final = {"H": HEADS, "D": LATENT, "WINDOW": _WINDOW, "PER_PAGE": 128, "KEYS": SPLIT_KEYS}


def attention_work(rows: int) -> Work:
    """Each row's own entries, its query and its result; scores and the weighted sum."""
    moved = rows * (_ENTRY_BYTES + 4 * HEADS * LATENT)
    return Work(f"T={rows}", moved, 4 * rows * HEADS * LATENT * _KEYS, "bf16")


_NOT_FOR: Final = {
    "gfx942": "entries and queries take more than the 64 KiB of shared memory of a compute unit"
}
_SPILLS: Final = (
    "half of the registers hold sums of 64 heads x 512 channels; what is left over is read again once a split"
)


def _part_bytes(rows: int) -> int:
    return rows * _SPLITS * HEADS * (LATENT + 2) * 4


ENTRIES: Final = (
    Entry(
        name="sparse attention, all splits of a row",
        kernel=all_splits_kernel,
        signature=_POINTERS | _ENDS | _SIZES,
        constexprs=_SHAPE | {"PAIRS": ROTARY // 2},
        num_warps=WARPS,
        num_stages=1,
        fp_fusion=False,
        spill_reason=_SPILLS,
        not_for=_NOT_FOR,
        work=(attention_work(8192),),
    ),
    Entry(
        name="sparse attention, one split",
        kernel=one_split_kernel,
        signature=_POINTERS | _PARTS | _SIZES,
        constexprs=_SHAPE,
        num_warps=WARPS,
        num_stages=1,
        fp_fusion=False,
        not_for=_NOT_FOR,
        work=(
            Work(
                "T=32",
                32 * (_ENTRY_BYTES + 2 * HEADS * LATENT) + _part_bytes(32),
                4 * 32 * HEADS * LATENT * _KEYS,
                "bf16",
            ),
        ),
    ),
    Entry(
        name="sparse attention, merge",
        kernel=merge_kernel,
        signature=_PARTS | _ENDS | {"splits": "i32", "heads": "i32:16"},
        constexprs={"H": MERGED_HEADS, "D": LATENT, "PAIRS": ROTARY // 2},
        fp_fusion=False,
        work=(
            Work("T=32", _part_bytes(32) + 32 * 2 * HEADS * LATENT, 32 * HEADS * LATENT * (3 * _SPLITS + 7)),
        ),
    ),
)
