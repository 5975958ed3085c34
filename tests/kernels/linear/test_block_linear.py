"""Linear layers over stored weights in Triton's interpreter; tiles and splits are shrunk."""

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.linear import block_linear
from epdserve.kernels.linear.block_linear import grouped_linear_fp8, linear_bf16, linear_fp8
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.quant.reference import (
    dequantize_fp8_blocks_ref,
    dequantize_fp8_ref,
    quantize_fp8_blocks_ref,
    quantize_fp8_ref,
)
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits, assert_same_bits
from torch import Tensor

TILE = Tile(n=16, t=8, k=32, warps=4, stages=1)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_linear, "SPLIT_K", 64)
    monkeypatch.setattr(block_linear, "MANY", 12)


def assert_product(got: Tensor, x: Tensor, weight: Tensor) -> None:
    """K roundings of 2**-24 of the sum of magnitudes, and the last cast."""
    exact = x.double() @ weight.double().t()
    bound = x.shape[-1] * 2.0**-24 * (x.double().abs() @ weight.double().abs().t())
    bound = bound + (exact.abs() * 2.0**-8 if got.dtype == torch.bfloat16 else 0.0)
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 32), (7, 15, 64), (8, 33, 96), (13, 16, 160)])
def test_fp8_products(rows: int, outputs: int, inputs: int, out_dtype: torch.dtype) -> None:
    codes, scales = quantize_fp8_ref(randn(rows, inputs))
    weight, weight_scale = quantize_fp8_blocks_ref(randn(outputs, inputs, seed=1))
    got = linear_fp8(codes, scales, weight, weight_scale, out_dtype=out_dtype, tile=TILE)
    assert got.dtype == out_dtype
    assert_product(got, dequantize_fp8_ref(codes, scales), dequantize_fp8_blocks_ref(weight, weight_scale))


@pytest.mark.parametrize("rows", [1, 9, 12])
def test_bf16_products(rows: int) -> None:
    x, weight = randn(rows, 96).bfloat16(), randn(17, 96, seed=1).bfloat16()
    assert_product(linear_bf16(x, weight, out_dtype=torch.float32, tile=TILE), x.float(), weight.float())


@pytest.mark.parametrize("rows", [1, 9, 13])
def test_groups_have_a_weight_each_and_rows_may_have_gaps(rows: int) -> None:
    x = randn(rows, 3, 200).bfloat16()[:, :, 8:104]
    stored = [quantize_fp8_blocks_ref(randn(32, 96, seed=group)) for group in range(3)]
    weight, scale = (torch.stack(parts) for parts in zip(*stored, strict=True))
    got = grouped_linear_fp8(x, weight, scale, out_dtype=torch.float32, tile=TILE)
    for group in range(3):
        assert_product(got[:, group], x[:, group].float(), dequantize_fp8_blocks_ref(*stored[group]))


def test_few_and_many_rows_give_the_same_bits() -> None:
    """Fewer than 12 rows go split by split, 12 and more in one program."""
    codes, scales = quantize_fp8_ref(randn(13, 160))
    weight = quantize_fp8_blocks_ref(randn(16, 160, seed=1))
    whole = linear_fp8(codes, scales, *weight, tile=TILE)
    assert_same_bits(linear_fp8(codes[:8], scales[:8], *weight, tile=TILE), whole[:8])


def test_a_row_depends_on_itself_alone() -> None:
    codes, scales = quantize_fp8_ref(randn(10, 160))
    weight = quantize_fp8_blocks_ref(randn(20, 160, seed=1))
    assert_row_bits(lambda c, s: linear_fp8(c, s, *weight, tile=TILE), codes, scales)


def test_no_row_is_legal_and_a_nan_stays_in_its_row() -> None:
    codes, scales = quantize_fp8_ref(randn(3, 64))
    weight = quantize_fp8_blocks_ref(randn(16, 64, seed=1))
    assert linear_fp8(codes[:0], scales[:0], *weight).shape == (0, 16)
    scales[1, 0] = 255
    got = linear_fp8(codes, scales, *weight, out_dtype=torch.float32, tile=TILE)
    assert bool(got[1].isnan().all())
    assert bool(got[[0, 2]].isfinite().all())


def test_bad_arguments_are_refused_with_their_value() -> None:
    codes, scales = quantize_fp8_ref(randn(2, 64))
    weight, weight_scale = quantize_fp8_blocks_ref(randn(32, 64))
    with pytest.raises(LaunchRefusedError, match="K must be a multiple of 32, got 48"):
        linear_bf16(torch.zeros(1, 48).bfloat16(), torch.zeros(3, 48).bfloat16())
    with pytest.raises(LaunchRefusedError, match=r"scale_TG must have the shape \(2, 2\), got \(2, 1\)"):
        linear_fp8(codes, scales[:, :1], weight, weight_scale)
    with pytest.raises(
        LaunchRefusedError, match=r"weight_scale must have the shape \(1, 1, 2\), got \(1, 2, 2\)"
    ):
        linear_fp8(codes, scales, weight, torch.cat([weight_scale, weight_scale]))
    with pytest.raises(LaunchRefusedError, match=r"got torch\.float16"):
        linear_fp8(codes, scales, weight, weight_scale, out_dtype=torch.float16)
