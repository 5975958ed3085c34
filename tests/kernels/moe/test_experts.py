"""Grouped W4A8 products, SwiGLU with its rounding, and the sum of the experts, in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.moe import experts as experts_module
from epdserve.kernels.moe.experts import combine, expert_product, swiglu_quantize
from epdserve.kernels.moe.reference import swiglu_ref
from epdserve.kernels.moe.route_rows import plan_experts
from epdserve.kernels.quant.reference import (
    dequantize_fp8_ref,
    dequantize_mxfp4_ref,
    quantize_fp8_ref,
    quantize_mxfp4_ref,
)
from support.kernel_rows import generator, randn
from support.triton_rows import assert_row_bits, assert_same_bits
from torch import Tensor

EXPERTS, TOP, LIMIT = 5, 2, 10.0
TILE = Tile(n=16, t=4, k=32, warps=4, stages=1)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "SPLIT_K", 64)


def choices(tokens: int) -> Tensor:
    chosen = torch.rand(tokens, EXPERTS, generator=generator(2)).topk(TOP, dim=1).indices
    return chosen.where(chosen != 3, 4)


@pytest.mark.parametrize("gather", [True, False], ids=["tokens", "places"])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(0, 16, 32), (1, 16, 32), (5, 17, 96)])
def test_products_of_every_expert(tokens: int, outputs: int, inputs: int, gather: bool) -> None:
    chosen = choices(tokens)
    plan = plan_experts(chosen, EXPERTS, TILE.t)
    codes, scales = quantize_fp8_ref(randn(tokens if gather else tokens * TOP, inputs))
    weight, weight_scale = quantize_mxfp4_ref(randn(EXPERTS, outputs, inputs, seed=1))
    got = expert_product(codes, scales, weight, weight_scale, plan, gather=gather, tile=TILE)
    x, w = dequantize_fp8_ref(codes, scales).double(), dequantize_mxfp4_ref(weight, weight_scale).double()
    for place, pair in enumerate(plan.order_P.tolist()):
        row = x[pair // TOP if gather else place]
        expert = w[int(chosen.flatten()[pair])]
        bound = inputs * 2.0**-24 * (expert.abs() @ row.abs()) + (expert @ row).abs() * 2.0**-8
        assert bool(((got[place].double() - expert @ row).abs() <= bound).all())


def test_a_row_has_the_same_bits_whoever_shares_its_expert() -> None:
    weight = quantize_mxfp4_ref(randn(EXPERTS, 32, 96, seed=1))

    def of_tokens(codes: Tensor, scales: Tensor, chosen: Tensor) -> Tensor:
        plan = plan_experts(chosen, EXPERTS, TILE.t)
        out = expert_product(codes, scales, *weight, plan, gather=True, tile=TILE)
        return out[plan.place_P.long()].view(len(chosen), TOP, 32)

    assert_row_bits(of_tokens, *quantize_fp8_ref(randn(4, 96)), choices(4))


@pytest.mark.parametrize("inner", [32, 96, 320])
def test_swiglu_is_rounded_as_the_reference_rounds_it(inner: int) -> None:
    x = (randn(6, 2 * inner) * 6).bfloat16()
    chosen, weights = choices(3), randn(3, TOP, seed=4).abs()
    plan = plan_experts(chosen, EXPERTS, 4)
    hidden = swiglu_ref(x[:, :inner], x[:, inner:], LIMIT) * weights.flatten()[plan.order_P.long()][:, None]
    got = dequantize_fp8_ref(*swiglu_quantize(x, LIMIT, plan, weights))
    expected = dequantize_fp8_ref(*quantize_fp8_ref(hidden.bfloat16()))
    # an ulp of exp may move a value across a rounding boundary: one step of FP8 then
    assert float((got != expected).float().mean()) < 0.01
    torch.testing.assert_close(got, expected, rtol=0.13, atol=1e-3)
    shared = dequantize_fp8_ref(*swiglu_quantize(x, LIMIT))
    plain = dequantize_fp8_ref(*quantize_fp8_ref(swiglu_ref(x[:, :inner], x[:, inner:], LIMIT).bfloat16()))
    assert float((shared != plain).float().mean()) < 0.01


def test_a_token_gets_its_experts_in_order_and_the_shared_one_last() -> None:
    chosen = choices(7)
    plan = plan_experts(chosen, EXPERTS, 4)
    y, shared = randn(14, 40, seed=5).bfloat16(), randn(7, 40, seed=6).bfloat16()
    pairs = y[plan.place_P.long()].view(7, TOP, 40).float()
    expected = ((pairs[:, 0] + pairs[:, 1]) + shared.float()).bfloat16()
    assert_same_bits(combine(y, shared, plan), expected)


def test_bad_arguments_are_refused_with_their_value() -> None:
    plan = plan_experts(choices(2), EXPERTS, 4)
    codes, scales = quantize_fp8_ref(randn(2, 64))
    weight = quantize_mxfp4_ref(randn(EXPERTS, 16, 64))
    with pytest.raises(LaunchRefusedError, match="tiles of 4 rows, not 8"):
        expert_product(codes, scales, *weight, plan, gather=True, tile=Tile(16, 8, 32, 4, 1))
    with pytest.raises(LaunchRefusedError, match="2 rows for 4 places of 2 choices a token"):
        expert_product(codes, scales, *weight, plan, gather=False, tile=TILE)
    with pytest.raises(LaunchRefusedError, match="got half of 40"):
        swiglu_quantize(torch.zeros(4, 40).bfloat16(), LIMIT)
    with pytest.raises(LaunchRefusedError, match="a plan and weights go together"):
        swiglu_quantize(torch.zeros(4, 64).bfloat16(), LIMIT, plan)
