"""Checks of products: FP8 and bfloat16 linear layers, routing, the experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from epdserve.kernels.linear.block_linear import grouped_linear_fp8, linear_bf16, linear_fp8
from epdserve.kernels.linear.tiles import SPLIT_K
from epdserve.kernels.moe.experts import combine, expert_product, swiglu_quantize
from epdserve.kernels.moe.plan import expert_tile
from epdserve.kernels.moe.reference import route_ref, swiglu_ref
from epdserve.kernels.moe.route_rows import plan_experts, route
from epdserve.kernels.quant.reference import (
    dequantize_fp8_blocks_ref,
    dequantize_fp8_ref,
    dequantize_mxfp4_ref,
    quantize_fp8_ref,
)
from epdserve.loadtest.gpu.case import Case, CaseMaker, compare, first_problem, same_bits
from epdserve.loadtest.gpu.data import bf16, fp8_codes, nibbles, powers, small_powers
from epdserve.loadtest.gpu.shapes import Shapes
from torch import Tensor

_SWIGLU_LIMIT = 10.0


def makers(shapes: Shapes, device: str) -> Iterator[tuple[str, CaseMaker]]:
    """Name and maker of each case."""
    weights = {
        "wq_a": (shapes.q_rank, shapes.hidden),
        "wq_b": (shapes.heads * shapes.latent, shapes.q_rank),
        "wkv": (shapes.latent, shapes.hidden),
        "wo_b": (shapes.hidden, shapes.o_groups * shapes.o_rank),
        "shared w1, w3": (2 * shapes.inner, shapes.hidden),
    }
    few, inputs = shapes.decode_rows[0], 4 * SPLIT_K
    yield f"linear FP8 in splits, T={few}", partial(_linear, few, shapes.latent, inputs, shapes, device)
    for rows in dict.fromkeys((shapes.prefill_rows, *shapes.decode_rows)):
        for name, (outputs, inputs) in weights.items():
            yield f"linear FP8 {name}, T={rows}", partial(_linear, rows, outputs, inputs, shapes, device)
        yield f"grouped linear wo_a, T={rows}", partial(_grouped, rows, shapes, device)
        yield f"linear bf16 gate, T={rows}", partial(_gate, rows, shapes, device)
        yield f"route, T={rows}", partial(_route, rows, shapes, device)
        yield f"expert plan, T={rows}", partial(_plan, rows, shapes, device)
        yield f"experts w1, w3, T={rows}", partial(_experts, rows, True, shapes, device)
        yield f"experts w2, T={rows}", partial(_experts, rows, False, shapes, device)
        yield f"SwiGLU to FP8, T={rows}", partial(_swiglu, rows, shapes, device)
        yield f"combine experts, T={rows}", partial(_combine, rows, shapes, device)


def product_bound(x: Tensor, weight: Tensor, exact: Tensor) -> Tensor:
    """Float32 sums in any order, and one rounding to bfloat16."""
    return x.shape[-1] * 2.0**-23 * (x.abs() @ weight.abs().t()) + exact.abs() * 2.0**-8


def _linear(rows: int, outputs: int, inputs: int, shapes: Shapes, device: str) -> Case:
    codes, scales = fp8_codes(rows, inputs, device=device), powers(rows, inputs // 32, device=device)
    weight = fp8_codes(outputs, inputs, device=device)
    scale = small_powers(-(-outputs // 32), inputs // 32, inputs=inputs, device=device)

    def run() -> Tensor:
        return linear_fp8(codes, scales, weight, scale)

    def check() -> str:
        some = slice(0, shapes.checked_rows)
        x = dequantize_fp8_ref(codes[some], scales[some]).double()
        wide = dequantize_fp8_blocks_ref(weight, scale).double()
        exact = x @ wide.t()
        got = run()
        return first_problem(
            compare(got[some], exact, product_bound(x, wide, exact)),
            same_bits(linear_fp8(codes[:1], scales[:1], weight, scale), got[:1], "alone"),
        )

    moved = rows * inputs * 33 / 32 + outputs * inputs * (1 + 1 / 1024) + 2 * rows * outputs
    return Case(run, check, moved, 2.0 * rows * outputs * inputs)


def _grouped(rows: int, shapes: Shapes, device: str) -> Case:
    groups, outputs = shapes.o_groups, shapes.o_rank
    inputs = shapes.heads * shapes.latent // groups
    x = bf16(rows, groups, inputs, device=device)
    weight = fp8_codes(groups, outputs, inputs, device=device)
    scale = small_powers(groups, outputs // 32, inputs // 32, inputs=inputs, device=device)

    def run() -> Tensor:
        return grouped_linear_fp8(x, weight, scale)

    def check() -> str:
        some, got = x[: shapes.checked_rows].double(), run()
        problems = []
        for group in range(groups):
            wide = dequantize_fp8_blocks_ref(weight[group], scale[group]).double()
            exact = some[:, group] @ wide.t()
            bound = product_bound(some[:, group], wide, exact)
            problems.append(compare(got[: len(some), group], exact, bound))
        alone = grouped_linear_fp8(x[:1], weight, scale)
        return first_problem(*problems, same_bits(alone, got[:1], "alone"))

    moved = 2 * x.numel() + weight.numel() + scale.numel() + 2 * rows * groups * outputs
    return Case(run, check, moved, 2.0 * rows * groups * outputs * inputs)


def _gate(rows: int, shapes: Shapes, device: str) -> Case:
    x, weight = bf16(rows, shapes.hidden, device=device), bf16(shapes.experts, shapes.hidden, device=device)

    def run() -> Tensor:
        return linear_bf16(x, weight, out_dtype=torch.float32)

    def check() -> str:
        some, wide, got = x[: shapes.checked_rows].double(), weight.double(), run()
        exact = some @ wide.t()
        return first_problem(
            compare(got[: len(some)], exact, product_bound(some, wide, exact)),
            same_bits(linear_bf16(x[:1], weight, out_dtype=torch.float32), got[:1], "alone"),
        )

    moved = 2 * (x.numel() + weight.numel()) + 4 * rows * shapes.experts
    return Case(run, check, moved, 2.0 * rows * shapes.experts * shapes.hidden)


def _logits(rows: int, shapes: Shapes, device: str) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, shapes.experts, device=device) * 3, torch.randn(shapes.experts, device=device)


def _route(rows: int, shapes: Shapes, device: str) -> Case:
    logits, bias = _logits(rows, shapes, device)

    def check() -> str:
        chosen, weights = route(logits, bias, shapes.top_experts, 1.5)
        expected, expected_weights = route_ref(logits, bias, shapes.top_experts, 1.5)
        moved = int((chosen != expected).any(dim=1).sum())
        if moved > rows // 1000:  # scores within an ulp of one another may change places
            return f"{moved} of {rows} rows chose otherwise"
        kept = (chosen == expected).all(dim=1)
        return compare(weights[kept], expected_weights[kept], 1e-5)

    moved = 4 * logits.numel() + 12 * rows * shapes.top_experts
    return Case(lambda: route(logits, bias, shapes.top_experts, 1.5), check, moved)


def _choices(rows: int, shapes: Shapes, device: str) -> tuple[Tensor, Tensor]:
    return route(*_logits(rows, shapes, device), shapes.top_experts, 1.5)


def _plan(rows: int, shapes: Shapes, device: str) -> Case:
    chosen, _ = _choices(rows, shapes, device)
    tile = expert_tile(chosen.numel(), shapes.experts)

    def check() -> str:
        order = plan_experts(chosen, shapes.experts, tile.t).order_P.long()
        return same_bits(order, chosen.flatten().sort(stable=True).indices, "order")

    return Case(lambda: plan_experts(chosen, shapes.experts, tile.t), check, 16.0 * chosen.numel())


def _experts(rows: int, first: bool, shapes: Shapes, device: str) -> Case:
    chosen, _ = _choices(rows, shapes, device)
    tile = expert_tile(chosen.numel(), shapes.experts)
    plan = plan_experts(chosen, shapes.experts, tile.t)
    outputs, inputs = (2 * shapes.inner, shapes.hidden) if first else (shapes.hidden, shapes.inner)
    count = rows if first else chosen.numel()
    codes, scales = fp8_codes(count, inputs, device=device), powers(count, inputs // 32, device=device)
    weight = nibbles(shapes.experts, outputs, inputs // 2, device=device)
    scale = small_powers(shapes.experts, outputs, inputs // 32, inputs=inputs, device=device)

    def run() -> Tensor:
        return expert_product(codes, scales, weight, scale, plan, gather=first, tile=tile)

    def check() -> str:
        got, problems = run(), []
        for place in range(0, len(got), max(1, len(got) // shapes.checked_rows)):
            pair = int(plan.order_P[place])
            row = pair // shapes.top_experts if first else place
            expert = int(chosen.flatten()[pair])
            x = dequantize_fp8_ref(codes[row : row + 1], scales[row : row + 1]).double()
            wide = dequantize_mxfp4_ref(weight[expert], scale[expert]).double()
            exact = x @ wide.t()
            problems.append(compare(got[place : place + 1], exact, product_bound(x, wide, exact)))
        return first_problem(*problems, _alone(got) if first else "")

    def _alone(got: Tensor) -> str:
        small = expert_tile(0, shapes.experts)
        single = plan_experts(chosen[:1], shapes.experts, small.t)
        alone = expert_product(codes[:1], scales[:1], weight, scale, single, gather=True, tile=small)
        top = shapes.top_experts
        return same_bits(alone[single.place_P.long()], got[plan.place_P[:top].long()], "alone")

    used = int(chosen.unique().numel())
    moved = (
        used * outputs * inputs * (1 / 2 + 1 / 32) + count * inputs * 33 / 32 + 2 * chosen.numel() * outputs
    )
    return Case(run, check, moved, 2.0 * chosen.numel() * outputs * inputs)


def _swiglu(rows: int, shapes: Shapes, device: str) -> Case:
    chosen, weights = _choices(rows, shapes, device)
    plan = plan_experts(chosen, shapes.experts, expert_tile(chosen.numel(), shapes.experts).t)
    x = bf16(chosen.numel(), 2 * shapes.inner, device=device)

    def check() -> str:
        codes, scales = swiglu_quantize(x, _SWIGLU_LIMIT, plan, weights)
        weight = weights.flatten()[plan.order_P.long()][:, None]
        hidden = swiglu_ref(x[:, : shapes.inner], x[:, shapes.inner :], _SWIGLU_LIMIT) * weight
        got, exact = (
            dequantize_fp8_ref(codes, scales),
            dequantize_fp8_ref(*quantize_fp8_ref(hidden.bfloat16())),
        )
        other = float((got != exact).float().mean())
        return "" if other < 0.01 else f"{100 * other:.2f} % of the codes differ"

    moved = x.numel() * 2 + chosen.numel() * shapes.inner * 33 / 32
    return Case(lambda: swiglu_quantize(x, _SWIGLU_LIMIT, plan, weights), check, moved)


def _combine(rows: int, shapes: Shapes, device: str) -> Case:
    chosen, _ = _choices(rows, shapes, device)
    plan = plan_experts(chosen, shapes.experts, expert_tile(chosen.numel(), shapes.experts).t)
    y, shared = bf16(chosen.numel(), shapes.hidden, device=device), bf16(rows, shapes.hidden, device=device)

    def check() -> str:
        total = torch.zeros(rows, shapes.hidden, device=device)
        for choice in range(shapes.top_experts):
            total += y[plan.place_P[choice :: shapes.top_experts].long()].float()
        return same_bits(combine(y, shared, plan), (total + shared.float()).bfloat16(), "sum")

    return Case(lambda: combine(y, shared, plan), check, 2.0 * (y.numel() + 2 * shared.numel()))
