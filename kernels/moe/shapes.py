"""Ahead-of-time compilations of the expert kernels, with the bytes and FLOPs of the released model."""

from __future__ import annotations

from typing import Final

from epdserve.kernels.catalogue import HIDDEN, Entry, Work
from epdserve.kernels.linear.tiles import SPLIT_K
from epdserve.kernels.moe.experts import combine_kernel, expert_product_kernel, swiglu_quantize_kernel
from epdserve.kernels.moe.plan import FEW_ROWS, MANY_ROWS
from epdserve.kernels.moe.route_rows import plan_kernel, route_kernel

_EXPERTS: Final = 384
_TOP: Final = 6
_INNER: Final = 2304
_ROWS: Final = (8192, 32)
_SIZES: Final = "outputs inputs stride_we stride_w stride_wse stride_ws stride_x stride_xs"


def expert_work(name: str, rows: int, outputs: int, inputs: int, *, gather: bool) -> Work:
    """Weights of the experts that rows reach on average, inputs and outputs once."""
    pairs = rows * _TOP
    reached = _EXPERTS * (1 - (1 - _TOP / _EXPERTS) ** rows)
    moved = reached * outputs * inputs * (1 / 2 + 1 / 32) + (rows if gather else pairs) * inputs * 33 / 32
    return Work(f"{name}, T={rows}", int(moved + 2 * pairs * outputs), 2 * pairs * outputs * inputs, "bf16")


def _products(many: bool) -> Entry:
    tile, rows = (MANY_ROWS, 8192) if many else (FEW_ROWS, 32)
    pointers = dict.fromkeys(("w_ptr", "w_scale_ptr", "x_ptr", "x_scale_ptr"), "*u8")
    return Entry(
        name=f"experts, {'many' if many else 'few'} rows",
        kernel=expert_product_kernel,
        signature=pointers
        | {"order_ptr": "*i32", "tiles_ptr": "*i32", "out_ptr": "*bf16", "splits": "i32"}
        | {size: "i32:16" for size in _SIZES.split()},
        constexprs={
            "TOP": _TOP,
            "SPLIT": SPLIT_K,
            "BLOCK_N": tile.n,
            "BLOCK_T": tile.t,
            "BLOCK_K": tile.k,
            "EVEN_K": True,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        work=(
            expert_work("w1, w3", rows, 2 * _INNER, HIDDEN, gather=True),
            expert_work("w2", rows, HIDDEN, _INNER, gather=False),
        ),
    )


ENTRIES: Final = (
    _products(many=False),
    _products(many=True),
    Entry(
        name="route",
        kernel=route_kernel,
        signature={
            "logits_ptr": "*fp32",
            "bias_ptr": "*fp32",
            "experts_ptr": "*i64",
            "weights_ptr": "*fp32",
            "stride_bias": "i32:16",
            "scaling": "fp32",
        },
        constexprs={"E": _EXPERTS, "TOP": _TOP, "BLOCK": 512, "TOP_BLOCK": 8},
        work=tuple(Work(f"T={t}", t * (4 * _EXPERTS + 12 * _TOP), t * 12 * _EXPERTS) for t in _ROWS),
    ),
    Entry(
        name="expert plan",
        kernel=plan_kernel,
        signature={
            "experts_ptr": "*i64",
            "order_ptr": "*i32",
            "place_ptr": "*i32",
            "tiles_ptr": "*i32",
            "pairs": "i32:16",
            "max_tiles": "i32",
        },
        constexprs={"E": _EXPERTS, "BINS": 512, "ROWS": MANY_ROWS.t, "SCAN": 1024},
        work=tuple(Work(f"T={t}", t * _TOP * 16) for t in _ROWS),
    ),
    Entry(
        name="SwiGLU to FP8",
        kernel=swiglu_quantize_kernel,
        signature={
            "x_ptr": "*bf16",
            "order_ptr": "*i32",
            "weights_ptr": "*fp32",
            "codes_ptr": "*u8",
            "scales_ptr": "*u8",
            "limit": "fp32",
            "inner": "i32:16",
        },
        constexprs={"HAS_WEIGHT": True, "GROUPS": 8},
        work=tuple(
            Work(f"T={t}", int(t * _TOP * _INNER * (4 + 33 / 32)), t * _TOP * _INNER * 10) for t in _ROWS
        ),
    ),
    Entry(
        name="combine experts",
        kernel=combine_kernel,
        signature={
            "y_ptr": "*bf16",
            "place_ptr": "*i32",
            "shared_ptr": "*bf16",
            "out_ptr": "*bf16",
            "channels": "i32:16",
        },
        constexprs={"TOP": _TOP, "BLOCK": 1024},
        work=tuple(Work(f"T={t}", t * HIDDEN * 2 * (_TOP + 2), t * HIDDEN * (_TOP + 1)) for t in _ROWS),
    ),
)
