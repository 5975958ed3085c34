"""Products whose rows are independent."""

import pytest
import torch
from epdserve.kernels.linear import grouped_linear, linear
from support.kernel_rows import ROWS, assert_rows_independent, randn

SHAPES = [(64, 24), (128, 512), (513, 33), (96, 80), (33, 3), (7, 5), (128, 1), (4, 2), (1280, 16)]
every_shape = pytest.mark.parametrize(("inputs", "outputs"), SHAPES, ids=lambda side: str(side))


@every_shape
def test_linear_rows_are_independent(inputs: int, outputs: int) -> None:
    weight = randn(outputs, inputs, seed=1)
    assert_rows_independent(lambda rows: linear(rows, weight), randn(300, inputs))


@every_shape
def test_grouped_rows_are_independent(inputs: int, outputs: int) -> None:
    weight = randn(3, outputs, inputs, seed=1)
    assert_rows_independent(lambda rows: grouped_linear(rows, weight), randn(ROWS, 3, inputs))


def test_the_projection_of_the_released_hyper_connections_has_independent_rows() -> None:
    weight = randn(24, 20480, seed=1)
    assert_rows_independent(lambda rows: linear(rows, weight), randn(40, 20480), most=17)


@every_shape
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 7, 8, 9, 33])
def test_linear_is_the_product(inputs: int, outputs: int, rows: int) -> None:
    x, weight = randn(rows, inputs), randn(outputs, inputs, seed=1)
    torch.testing.assert_close(
        linear(x, weight), (x.double() @ weight.double().t()).float(), atol=1e-4, rtol=1e-5
    )


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 33])
def test_grouped_linear_is_one_linear_per_group(rows: int) -> None:
    x, weight = randn(rows, 3, 64), randn(3, 24, 64, seed=1)
    result = grouped_linear(x, weight)
    assert result.shape == (rows, 3, 24)
    for group in range(3):
        torch.testing.assert_close(result[:, group], linear(x[:, group], weight[group]), atol=1e-5, rtol=1e-5)


def test_leading_dimensions_are_kept() -> None:
    x, weight = randn(2, 3, 5, 64), randn(24, 64, seed=1)
    assert torch.equal(linear(x, weight), linear(x.view(30, 64), weight).view(2, 3, 5, 24))
    assert linear(randn(64), weight).shape == (24,)


def test_strided_inputs_give_the_bits_of_contiguous_ones() -> None:
    wide, weight = randn(21, 192), randn(24, 64, seed=1)
    assert torch.equal(linear(wide[:, 64:128], weight), linear(wide[:, 64:128].contiguous(), weight))
    assert torch.equal(linear(wide[::2, :64], weight), linear(wide[:, :64].contiguous(), weight)[::2])
