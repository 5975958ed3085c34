import pytest
import torch
from epdserve.kernels.norm import rms_norm
from support.kernel_rows import assert_rows_independent, randn

EPS = 1e-20


def test_it_is_the_formula_in_float64() -> None:
    x, weight = randn(13, 96), randn(96, seed=1)
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), expected, atol=1e-6, rtol=1e-6)


def test_a_zero_row_stays_zero() -> None:
    assert not rms_norm(torch.zeros(2, 32), torch.ones(32), EPS).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_cast_once_at_the_end(dtype: torch.dtype) -> None:
    x, weight = randn(5, 64).to(dtype), randn(64, seed=1)
    result = rms_norm(x, weight, EPS)
    assert result.dtype == dtype
    assert torch.equal(result, rms_norm(x.float(), weight, EPS).to(dtype))


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (2, 3, 32), (32,)], ids=str)
def test_any_leading_shape_works(shape: tuple[int, ...]) -> None:
    assert rms_norm(randn(*shape), torch.ones(32), EPS).shape == shape


@pytest.mark.parametrize("channels", [32, 33, 64, 512, 1280, 5120])
def test_rows_are_independent(channels: int) -> None:
    weight = randn(channels, seed=1)
    assert_rows_independent(lambda rows: rms_norm(rows, weight, EPS), randn(90, channels))
