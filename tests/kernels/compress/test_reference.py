import pytest
import torch
from epdserve.kernels.compress import pool_pairs
from epdserve.kernels.linear import linear
from epdserve.kernels.norm import rms_norm
from support.kernel_rows import ROWS, assert_rows_independent, block, randn


def test_ratio_two_latents_are_the_golden_ones() -> None:
    golden = block("compressor_ratio2")
    value, gate = linear(golden["x"], golden["wkv"]), linear(golden["x"], golden["wgate"])
    pairs = len(golden["x"]) // 2 * 2
    pooled = pool_pairs(value[0:pairs:2], gate[0:pairs:2], value[1:pairs:2], gate[1:pairs:2])
    latent = rms_norm(pooled, golden["norm"], 1e-20)
    torch.testing.assert_close(latent, golden["latent"], atol=1e-6, rtol=0)


def test_a_pair_that_is_closed_by_a_single_step_is_the_golden_one() -> None:
    golden = block("compressor_ratio2")
    for position, expected in zip(golden["step_position"].tolist(), golden["step_latent"], strict=True):
        pair = golden["x"][[position - 1, position]]
        value, gate = linear(pair, golden["wkv"]), linear(pair, golden["wgate"])
        latent = rms_norm(pool_pairs(value[0], gate[0], value[1], gate[1]), golden["norm"], 1e-20)
        torch.testing.assert_close(latent, expected, atol=1e-6, rtol=0)


def test_ratio_one_latents_are_the_golden_ones() -> None:
    golden = block("compressor_ratio1")
    latent = rms_norm(linear(golden["x"], golden["wkv"]), golden["norm"], 1e-20)
    torch.testing.assert_close(latent, golden["latent"], atol=1e-6, rtol=0)


def test_equal_gates_give_the_mean() -> None:
    first, second, gate = randn(5, 32), randn(5, 32, seed=1), randn(5, 32, seed=2)
    torch.testing.assert_close(pool_pairs(first, gate, second, gate), (first + second) / 2)


@pytest.mark.parametrize("distance", [80.0, 1e3, 1e30])
def test_far_gates_choose_one_side(distance: float) -> None:
    first, second, gate = randn(2, 8), randn(2, 8, seed=1), randn(2, 8, seed=2)
    torch.testing.assert_close(pool_pairs(first, gate + distance, second, gate), first)
    torch.testing.assert_close(pool_pairs(first, gate - distance, second, gate), second)


def test_no_pair_is_legal() -> None:
    none = torch.zeros(0, 8)
    assert pool_pairs(none, none, none, none).shape == (0, 8)


@pytest.mark.parametrize("channels", [32, 33, 512])
def test_rows_are_independent(channels: int) -> None:
    assert_rows_independent(pool_pairs, *(randn(ROWS, channels, seed=i) for i in range(4)))
