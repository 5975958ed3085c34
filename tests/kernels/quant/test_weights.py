"""Weight formats: FP8 with 32x32 blocks, packed E2M1 with one scale per row and 32 columns."""

import pytest
import torch
from epdserve.kernels.linear import linear
from epdserve.kernels.quant import (
    decode_e8m0,
    dequantize_fp8_blocks,
    dequantize_mxfp4,
    quantize_fp8,
    quantize_fp8_blocks,
    quantize_mxfp4,
    round_fp8,
)
from support.kernel_rows import bits, block, randn


def test_products_with_quantised_weights_match_the_golden_sums() -> None:
    golden = block("scaled_matmul")
    codes, scales = quantize_fp8(golden["x"].float())
    assert torch.equal(codes, golden["x_q"])
    assert torch.equal(decode_e8m0(scales), golden["x_scale"])
    x = round_fp8(golden["x"].float())
    fp8 = dequantize_fp8_blocks(golden["fp8_weight"], golden["fp8_scale"])
    fp4 = dequantize_mxfp4(golden["fp4_weight"], golden["fp4_scale"])
    torch.testing.assert_close(linear(x, fp8), golden["y_fp8"], atol=1e-6, rtol=0)
    torch.testing.assert_close(linear(x, fp4), golden["y_fp4"], atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (32, 32), (65, 96), (80, 100)], ids=str)
def test_fp8_blocks_survive_a_second_round_trip_to_the_bit(shape: tuple[int, int]) -> None:
    codes, scales = quantize_fp8_blocks(randn(*shape) * 3)
    assert codes.shape == shape
    assert scales.shape == tuple(-(-side // 32) for side in shape)
    weight = dequantize_fp8_blocks(codes, scales)
    assert torch.equal(bits(dequantize_fp8_blocks(*quantize_fp8_blocks(weight))), bits(weight))
    torch.testing.assert_close(weight, randn(*shape) * 3, rtol=2**-4, atol=1e-2)


def test_bytes_and_float8_dtypes_are_the_same_weight() -> None:
    golden = block("scaled_matmul")
    as_bytes = golden["fp8_weight"].view(torch.uint8), golden["fp8_scale"].view(torch.uint8)
    assert torch.equal(
        dequantize_fp8_blocks(*as_bytes), dequantize_fp8_blocks(golden["fp8_weight"], golden["fp8_scale"])
    )
    packed = golden["fp4_weight"].view(torch.uint8), golden["fp4_scale"].view(torch.uint8)
    assert torch.equal(dequantize_mxfp4(*packed), dequantize_mxfp4(golden["fp4_weight"], golden["fp4_scale"]))


def test_every_dequantised_value_is_exact_in_bfloat16() -> None:
    golden = block("scaled_matmul")
    for weight in (
        dequantize_fp8_blocks(golden["fp8_weight"], golden["fp8_scale"]),
        dequantize_mxfp4(golden["fp4_weight"], golden["fp4_scale"]),
    ):
        assert torch.equal(weight.bfloat16().float(), weight)


def test_mxfp4_takes_stacked_experts() -> None:
    weight = randn(3, 5, 64)
    packed, scale = quantize_mxfp4(weight)
    assert packed.shape == (3, 5, 32)
    assert scale.shape == (3, 5, 2)
    stacked = dequantize_mxfp4(packed.view(torch.int8), scale)
    assert torch.equal(stacked[1], dequantize_mxfp4(packed[1], scale[1]))


def test_a_scale_of_the_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"33x32 weight must be \(2, 1\)"):
        dequantize_fp8_blocks(torch.zeros(33, 32, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
