"""Ahead-of-time compilations of the linear kernels, with the bytes and FLOPs of the released model's layers."""

from __future__ import annotations

from typing import Final

from epdserve.kernels.catalogue import HIDDEN, Entry, Work
from epdserve.kernels.linear.block_linear import add_splits_kernel, linear_kernel
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.linear.tiles import FEW_ROWS, MANY_ROWS, SPLIT_K

_SIZES: Final = (
    "outputs inputs stride_wg stride_w stride_wsg stride_ws stride_xg stride_x stride_xs "
    "stride_out_split stride_out"
)
_BYTES: Final = {"e4m3": 1 + 1 / 32, "bf16": 2.0}  # of an input channel, its scale included
_WEIGHT_BYTES: Final = {"e4m3": 1 + 1 / 1024, "bf16": 2.0}


def linear_work(
    name: str, rows: int, groups: int, outputs: int, inputs: int, w_format: str, x_format: str
) -> Work:
    """Inputs, weight and bfloat16 outputs once; a multiplication and an addition a product."""
    moved = groups * (
        rows * inputs * _BYTES[x_format] + outputs * inputs * _WEIGHT_BYTES[w_format] + 2 * rows * outputs
    )
    return Work(f"{name}, T={rows}", int(moved), 2 * rows * groups * outputs * inputs, "bf16")


def _entry(name: str, w_format: str, x_format: str, many: bool, work: tuple[Work, ...]) -> Entry:
    tile: Tile = MANY_ROWS if many else FEW_ROWS
    pointers = {
        "w_ptr": "*bf16" if w_format == "bf16" else "*u8",
        "w_scale_ptr": "*u8",
        "x_ptr": "*bf16" if x_format == "bf16" else "*u8",
        "x_scale_ptr": "*u8",
        "out_ptr": "*bf16" if many else "*fp32",
    }
    return Entry(
        name=f"{name}, {'many' if many else 'few'} rows",
        kernel=linear_kernel,
        signature=pointers | {size: "i32:16" for size in _SIZES.split()} | {"rows": "i32", "splits": "i32"},
        constexprs={
            "W_FORMAT": w_format,
            "X_FORMAT": x_format,
            "SPLIT": SPLIT_K,
            "ALL_SPLITS": many,
            "BLOCK_N": tile.n,
            "BLOCK_T": tile.t,
            "BLOCK_K": tile.k,
            "EVEN_K": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        work=work,
    )


def _kind(
    name: str, w_format: str, x_format: str, layers: dict[str, tuple[int, int, int]]
) -> tuple[Entry, Entry]:
    def work(rows: int) -> tuple[Work, ...]:
        return tuple(linear_work(layer, rows, *sizes, w_format, x_format) for layer, sizes in layers.items())

    return (
        _entry(name, w_format, x_format, False, work(32)),
        _entry(name, w_format, x_format, True, work(8192)),
    )


ENTRIES: Final = (
    *_kind(
        "linear FP8",
        "e4m3",
        "e4m3",
        {
            "wq_a": (1, 1280, HIDDEN),
            "wq_b": (1, 32_768, 1280),
            "wkv": (1, 512, HIDDEN),
            "wo_b": (1, HIDDEN, 8192),
            "shared w1, w3": (1, 4608, HIDDEN),
            "shared w2": (1, HIDDEN, 2304),
        },
    ),
    *_kind("linear grouped", "e4m3", "bf16", {"wo_a": (8, 1024, 4096)}),
    *_kind("linear bf16", "bf16", "bf16", {"gate": (1, 384, HIDDEN)}),
    Entry(
        name="linear, add splits",
        kernel=add_splits_kernel,
        signature={"part_ptr": "*fp32", "out_ptr": "*bf16", "splits": "i32", "size": "i32:16"},
        constexprs={"BLOCK": 1024},
        work=(Work("wo_b, T=32", 32 * HIDDEN * (7 * 4 + 2), 32 * HIDDEN * 7),),
    ),
)
