"""Products of each expert with its rows on a GPU: MXFP4 weights, FP8 activations (W4A8).

Tiles of rows come from ``ExpertPlan``; rows of the first product are gathered by it, rows of the second lie in its
order. K is summed as everywhere (linear/tiles.py): a program does all splits, so few rows of many experts fill the
machine by their number.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from epdserve.kernels.launch import LaunchRefusedError, check_contiguous, check_tensor
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.linear.tiles import SPLIT_K, tile_product
from epdserve.kernels.moe.plan import ExpertPlan, tile_of
from epdserve.kernels.quant.codes import e4m3_code, fp8_scale_bits, magnitude_bits, narrow
from torch import Tensor

_GROUPS: Final = 8  # of 32 channels, of a program that quantises


@triton.jit
def expert_product_kernel(
    w_ptr: tl.tensor,
    w_scale_ptr: tl.tensor,
    x_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    order_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    splits: tl.tensor,
    stride_we: tl.tensor,
    stride_w: tl.tensor,
    stride_wse: tl.tensor,
    stride_ws: tl.tensor,
    stride_x: tl.tensor,
    stride_xs: tl.tensor,
    TOP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
) -> None:
    """A tile of one expert's outputs; row of place p is order[p] // TOP, or p itself if TOP is 0."""
    tile = tiles_ptr + tl.program_id(1) * 3
    expert = tl.load(tile).to(tl.int64)
    if expert >= 0:
        first, count = tl.load(tile + 1), tl.load(tile + 2)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = first + tl.arange(0, BLOCK_T)
        n_inside, inside = n < outputs, tl.arange(0, BLOCK_T) < count
        row = place
        if TOP:
            row = tl.load(order_ptr + place, mask=inside, other=0) // TOP
        total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for split in range(splits):
            total += tile_product(
                w_ptr + expert * stride_we, w_scale_ptr + expert * stride_wse, n, n_inside, stride_w, stride_ws,
                x_ptr, x_scale_ptr, row, inside, stride_x, stride_xs,
                split * SPLIT, tl.minimum(split * SPLIT + SPLIT, inputs), inputs,
                "e2m1", "e4m3", BLOCK_N, BLOCK_T, BLOCK_K, EVEN_K,
            )  # fmt: skip
        target = out_ptr + place.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(target, narrow(total, out_ptr.dtype.element_ty), mask=n_inside[:, None] & inside[None, :])


@triton.jit
def swiglu_quantize_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    limit: tl.tensor,
    inner: tl.tensor,
    HAS_WEIGHT: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """Gate | up (2 * inner) of one place -> silu(gate) * up * weight, rounded to bfloat16, then to FP8 per 32."""
    place = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    channel = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = channel < inner
    gate = tl.load(x_ptr + place * 2 * inner + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + place * 2 * inner + inner + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    hidden = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    if HAS_WEIGHT:
        pair = tl.load(order_ptr + place)
        hidden = hidden * tl.load(weights_ptr + tl.maximum(pair, 0))
    hidden = narrow(hidden, tl.bfloat16).to(tl.float32)
    scale = fp8_scale_bits(tl.max(magnitude_bits(hidden), axis=1))
    code = e4m3_code(
        tl.div_rn(hidden, tl.broadcast_to(scale.to(tl.float32, bitcast=True)[:, None], (GROUPS, 32)))
    )
    tl.store(codes_ptr + place * inner + channel, code.to(tl.uint8), mask=inside)
    tl.store(scales_ptr + place * (inner // 32) + group, (scale >> 23).to(tl.uint8), mask=group < inner // 32)


@triton.jit
def combine_kernel(
    y_ptr: tl.tensor,
    place_ptr: tl.tensor,
    shared_ptr: tl.tensor,
    out_ptr: tl.tensor,
    channels: tl.tensor,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A token's experts added in the order of its choices, then its shared expert; float32, one rounding."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP):
        place = tl.load(place_ptr + token * TOP + i).to(tl.int64)
        end = tl.where(place >= 0, channels, 0)  # a pair without a place adds nothing
        y = tl.load(y_ptr + place * channels + channel, mask=channel < end, other=0.0)
        total += y.to(tl.float32)
    total += tl.load(shared_ptr + token * channels + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * channels + channel, narrow(total, out_ptr.dtype.element_ty), mask=inside)


def expert_product(
    codes_TK: Tensor,
    scale_TG: Tensor,
    weight_ENK: Tensor,
    weight_scale: Tensor,
    plan: ExpertPlan,
    *,
    gather: bool,
    tile: Tile | None = None,
) -> Tensor:
    """Each place's row times its expert: (P, N) bfloat16 in the order of the plan.

    Args:
        codes_TK, scale_TG: E4M3 bytes (rows, K) and UE8M0 bytes (rows, K / 32): a row a token, or a row a place.
        weight_ENK, weight_scale: (E, N, K / 2) packed E2M1 and (E, N, K / 32) UE8M0.
        plan: Of tiles of ``tile.t`` rows, if a tile is given.
        gather: Rows are tokens, found through the plan; otherwise places.
        tile: Another tile than the plan's; results have the same bits with any.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: exact products, float32 sums in the order of linear/tiles.py, one rounding. Error as ``linear_fp8``.
    """
    tile = tile or tile_of(plan)
    rows, inputs = codes_TK.shape
    experts, outputs, half = weight_ENK.shape
    check_tensor("codes_TK", codes_TK, (torch.uint8,), (None, None))
    check_tensor("scale_TG", scale_TG, (torch.uint8,), (rows, inputs // 32), like=codes_TK)
    check_tensor("weight_ENK", weight_ENK, (torch.uint8,), (experts, outputs, inputs // 2), like=codes_TK)
    check_tensor(
        "weight_scale", weight_scale, (torch.uint8,), (experts, outputs, inputs // 32), like=codes_TK
    )
    places = len(plan.order_P)
    if inputs % 32 or not half:
        raise LaunchRefusedError(f"K must be a multiple of 32, got {inputs}")
    if plan.tile_rows != tile.t:
        raise LaunchRefusedError(f"the plan has tiles of {plan.tile_rows} rows, not {tile.t}")
    if rows * plan.top_k != places if gather else rows != places:
        raise LaunchRefusedError(f"{rows} rows for {places} places of {plan.top_k} choices a token")
    out = torch.empty(places, outputs, dtype=torch.bfloat16, device=codes_TK.device)
    if out.numel():
        expert_product_kernel[(triton.cdiv(outputs, tile.n), len(plan.tiles))](
            weight_ENK, weight_scale, codes_TK, scale_TG, plan.order_P, plan.tiles, out,
            outputs, inputs, triton.cdiv(inputs, SPLIT_K),
            weight_ENK.stride(0), weight_ENK.stride(1), weight_scale.stride(0), weight_scale.stride(1),
            codes_TK.stride(0), scale_TG.stride(0),
            TOP=plan.top_k if gather else 0, SPLIT=SPLIT_K,
            BLOCK_N=tile.n, BLOCK_T=tile.t, BLOCK_K=tile.k, EVEN_K=inputs % tile.k == 0,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def swiglu_quantize(
    x_PC: Tensor, limit: float, plan: ExpertPlan | None = None, weights_Tk: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """SwiGLU of gate | up rows (P, 2 * inner) bfloat16, times the place's routing weight, as FP8: codes, scales.

    Args:
        x_PC: Contiguous; inner a multiple of 32.
        limit: Of the gate from above, of up on both sides.
        plan, weights_Tk: Order of the places and (T, k) float32 weights; neither for a shared expert.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: float32, one rounding to bfloat16, then ``quantize_fp8``'s; equal to the references up to 2 ulp of exp
    before the roundings.
    """
    check_tensor("x_PC", x_PC, (torch.bfloat16,), (None, None))
    check_contiguous("x_PC", x_PC)
    places, inner = x_PC.shape[0], x_PC.shape[1] // 2
    if inner % 32 or not inner or x_PC.shape[1] % 2:
        raise LaunchRefusedError(f"inner must be a multiple of 32, got half of {x_PC.shape[1]}")
    if (plan is None) != (weights_Tk is None):
        raise LaunchRefusedError("a plan and weights go together")
    if weights_Tk is not None:
        check_tensor("weights_Tk", weights_Tk, (torch.float32,), (None, None), like=x_PC)
        check_contiguous("weights_Tk", weights_Tk)
        if weights_Tk.numel() != places:
            raise LaunchRefusedError(f"{weights_Tk.numel()} weights for {places} places")
    codes = torch.empty(places, inner, dtype=torch.uint8, device=x_PC.device)
    scales = torch.empty(places, inner // 32, dtype=torch.uint8, device=x_PC.device)
    if codes.numel():
        swiglu_quantize_kernel[(places, triton.cdiv(inner, 32 * _GROUPS))](
            x_PC, x_PC if plan is None else plan.order_P, x_PC if weights_Tk is None else weights_Tk, codes, scales,
            limit, inner, HAS_WEIGHT=weights_Tk is not None, GROUPS=_GROUPS, num_warps=4,
        )  # fmt: skip
    return codes, scales


def combine(y_PD: Tensor, shared_TD: Tensor, plan: ExpertPlan) -> Tensor:
    """Sum of each token's experts and its shared expert: (T, D) bfloat16, float32 inside, choices in order.

    Raises:
        LaunchRefusedError: A dtype, shape or stride that the kernel does not take.

    Numerics: as the reference's sum over choices, then the shared expert; bitwise for one rounding an addition.
    """
    tokens, channels = shared_TD.shape
    check_tensor("y_PD", y_PD, (torch.bfloat16,), (tokens * plan.top_k, channels))
    check_tensor("shared_TD", shared_TD, (torch.bfloat16,), (None, None), like=y_PD)
    check_contiguous("y_PD", y_PD)
    check_contiguous("shared_TD", shared_TD)
    out = torch.empty_like(shared_TD)
    if out.numel():
        combine_kernel[(tokens, triton.cdiv(channels, 1024))](
            y_PD, plan.place_P, shared_TD, out, channels, TOP=plan.top_k, BLOCK=1024, num_warps=4
        )  # fmt: skip
    return out
