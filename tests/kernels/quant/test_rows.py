"""Activations rounded in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.quant.reference import quantize_fp4_e8m0_ref, quantize_fp8_ref
from epdserve.kernels.quant.rows import quantize_fp4_e8m0, quantize_fp8
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits, assert_same_bits
from torch import Tensor

Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
PAIRS = [(quantize_fp8, quantize_fp8_ref), (quantize_fp4_e8m0, quantize_fp4_e8m0_ref)]
both = pytest.mark.parametrize(("launched", "reference"), PAIRS, ids=["fp8", "fp4"])


@both
@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 96), (2, 2, 1056)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_equal_the_reference(
    launched: Quantizer, reference: Quantizer, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = (randn(*shape) * torch.exp2(randn(*shape, seed=1) * 8)).to(dtype)
    for got, expected in zip(launched(x), reference(x), strict=True):
        assert_same_bits(got, expected)


@both
def test_every_binade_and_zero(launched: Quantizer, reference: Quantizer) -> None:
    x = torch.exp2(torch.arange(-126.0, 98.0, 0.25)).view(28, 32)  # the reference overflows from 2**104 on
    x = torch.cat([x, -x, torch.zeros(1, 32), torch.full((1, 32), -0.0)])
    for got, expected in zip(launched(x), reference(x), strict=True):
        assert_same_bits(got, expected)


@both
def test_rows_may_have_gaps_and_a_row_depends_on_itself_alone(
    launched: Quantizer, reference: Quantizer
) -> None:
    wide = randn(5, 200)
    for got, expected in zip(launched(wide[:, 3:99]), reference(wide[:, 3:99]), strict=True):
        assert_same_bits(got, expected)
    assert_row_bits(launched, randn(7, 64))


def test_bad_arguments_are_refused_with_their_value() -> None:
    with pytest.raises(LaunchRefusedError, match="channels must be a positive multiple of 32, got 48"):
        quantize_fp8(torch.zeros(2, 48))
    with pytest.raises(LaunchRefusedError, match=r"got torch\.int32"):
        quantize_fp4_e8m0(torch.zeros(2, 32, dtype=torch.int32))
