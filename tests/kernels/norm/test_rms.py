"""RMS normalisation in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.norm.reference import rms_norm_ref
from epdserve.kernels.norm.rms import rms_norm
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits

EPS = 1e-20


@pytest.mark.parametrize("channels", [1, 31, 32, 33, 128, 1280])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_equal_the_reference_within_the_rounding_of_a_sum(rows: int, channels: int) -> None:
    x, weight = randn(rows, channels), randn(channels, seed=1)
    # a sum of n squares differs by at most n ulp between orders; its root by half of that
    torch.testing.assert_close(
        rms_norm(x, weight, EPS), rms_norm_ref(x, weight, EPS), rtol=2e-7 * (channels + 4), atol=0.0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_cast_at_the_end(dtype: torch.dtype) -> None:
    x, weight = randn(5, 96).to(dtype), randn(96, seed=1).to(dtype)
    got = rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), rms_norm_ref(x, weight, EPS).float(), rtol=8e-3, atol=1e-6)


def test_rows_with_gaps_and_more_dimensions() -> None:
    x, weight = randn(4, 3, 80), randn(64, seed=1)
    part = x[:, :, 7:71]
    assert torch.equal(rms_norm(part, weight, EPS), rms_norm(part.contiguous(), weight, EPS))


def test_a_row_depends_on_itself_alone() -> None:
    weight = randn(200, seed=1)
    assert_row_bits(lambda x: rms_norm(x, weight, EPS), randn(13, 200))


def test_a_zero_row_stays_zero_and_a_bad_value_stays_in_its_row() -> None:
    x = torch.ones(4, 40)
    x[0] = 0.0
    x[1, 3] = float("nan")
    x[2, 5] = float("inf")
    got = rms_norm(x, torch.ones(40), EPS)
    assert torch.equal(got[0], torch.zeros(40))
    assert bool(got[1].isnan().all())
    assert bool(got[2, 5].isnan())
    assert float(got[2].nan_to_num().abs().sum()) == 0.0
    assert torch.equal(got[3], torch.ones(40))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 8, dtype=torch.int32), torch.ones(8), "got torch.int32"),
        (torch.ones(2, 8), torch.ones(7), r"got \(7,\)"),
        (torch.ones(8, 2).t(), torch.ones(8), r"strides \(1, 2\)"),
        (torch.ones(1, 20_000), torch.ones(20_000), "20000 channels"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(
    x: torch.Tensor, weight: torch.Tensor, message: str
) -> None:
    with pytest.raises(LaunchRefusedError, match=message):
        rms_norm(x, weight, EPS)
