"""Hyper-connections in Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.mhc import reference
from epdserve.kernels.mhc.streams import advance, collapse, expand, hyper_coefficients
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits, assert_same_bits

ITERS, HC_EPS, EPS = 20, 1e-6, 1e-20
SHAPES = [(0, 64), (1, 32), (3, 257), (17, 40)]


def weights(channels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return randn(24, 4 * channels, seed=5) * channels**-0.5, torch.tensor([0.7, 1.1, 0.9]), randn(24, seed=6)


def update(rows: int, channels: int) -> tuple[torch.Tensor, ...]:
    comb = reference.sinkhorn_ref(randn(rows, 4, 4, seed=1), ITERS, HC_EPS)
    return randn(rows, channels, seed=2), randn(rows, 4, seed=3).abs(), comb.contiguous()


def bound(channels: int) -> float:
    """Dot products of 4 D terms of variance 1/D differ by some tens of ulp between orders; 20 divisions contract."""
    return 2.0**-23 * (64 + channels**0.5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coefficients_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    streams, (fn, scale, base) = randn(shape[0], 4, shape[1]), weights(shape[1])
    arguments = (streams, fn, scale, base, ITERS, HC_EPS)
    for got, expected in zip(
        hyper_coefficients(*arguments), reference.hyper_coefficients_ref(*arguments), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=4 * bound(shape[1]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_expand_and_collapse_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    streams, (out, post, comb) = randn(shape[0], 4, shape[1]), update(*shape)
    torch.testing.assert_close(
        expand(streams, out, post, comb), reference.expand_ref(streams, out, post, comb), rtol=0, atol=4e-6
    )
    torch.testing.assert_close(
        collapse(streams, post), reference.collapse_ref(streams, post), rtol=0, atol=4e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_one_pass_gives_the_bits_of_three(dtype: torch.dtype) -> None:
    rows, channels = 5, 96
    streams, (fn, scale, base) = randn(rows, 4, channels).to(dtype), weights(channels)
    out, post, comb = update(rows, channels)
    out, pre = out.to(dtype), post.flip(1).contiguous()
    new, collapsed, coefficients = advance(streams, out, post, comb, pre, fn, scale, base, ITERS, HC_EPS, EPS)
    alone = expand(streams, out, post, comb)
    assert_same_bits(new, alone)
    assert_same_bits(collapsed, collapse(alone, pre))
    for got, expected in zip(
        coefficients, hyper_coefficients(alone, fn, scale, base, ITERS, HC_EPS, EPS), strict=True
    ):
        assert_same_bits(got, expected)


def test_columns_of_the_mixing_matrix_sum_to_one() -> None:
    comb = hyper_coefficients(randn(6, 4, 64), *weights(64), ITERS, HC_EPS)[2]
    torch.testing.assert_close(comb.sum(1), torch.ones(6, 4), rtol=0, atol=1e-5)


def _advance(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    streams, out, post, comb, pre = rows
    new, collapsed, coefficients = advance(
        streams, out, post, comb, pre, *weights(streams.shape[2]), 3, HC_EPS
    )
    return new, collapsed, *coefficients


def test_streams_and_inputs_depend_on_their_row_alone() -> None:
    rows, channels = 18, 32
    out, post, comb = update(rows, channels)
    assert_row_bits(
        lambda *given: _advance(*given)[:2],
        randn(rows, 4, channels),
        out,
        post,
        comb,
        post.flip(1).contiguous(),
    )


def test_coefficients_do_not_depend_on_the_rows_beside_them() -> None:
    """At the same place of a tile to the bit; elsewhere the interpreter's BLAS, unlike a GPU, may round otherwise."""
    streams, (fn, scale, base) = randn(18, 4, 32), weights(32)
    arguments = (fn, scale, base, 3, HC_EPS)
    whole = hyper_coefficients(streams, *arguments)
    for part in (slice(0, 1), slice(0, 17), slice(16, 18)):
        for got, expected in zip(hyper_coefficients(streams[part], *arguments), whole, strict=True):
            assert_same_bits(got, expected[part])
    others = torch.where(torch.arange(18).view(-1, 1, 1) == 5, streams, -2 * streams)
    moved = hyper_coefficients(streams.flip(0), *arguments)
    for same, got, expected in zip(hyper_coefficients(others, *arguments), moved, whole, strict=True):
        assert_same_bits(same[5], expected[5])
        torch.testing.assert_close(got.flip(0), expected, rtol=0, atol=bound(32))


def test_a_bad_row_spoils_no_other() -> None:
    rows, channels = 3, 32
    out, post, comb = update(rows, channels)
    streams = randn(rows, 4, channels)
    good = _advance(streams, out, post, comb, post)
    streams[1, 2, 3], out[1, 5] = float("nan"), float("inf")
    for got, expected in zip(_advance(streams, out, post, comb, post), good, strict=True):
        assert_same_bits(got[[0, 2]], expected[[0, 2]])
        assert bool(got[1].isnan().any())


def test_rows_with_gaps() -> None:
    wide = randn(3, 5, 32)
    assert_same_bits(
        collapse(wide[:, 1:], torch.ones(3, 4)), collapse(wide[:, 1:].contiguous(), torch.ones(3, 4))
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: collapse(randn(2, 3, 8), torch.ones(2, 3)), r"got \(2, 3, 8\)"),
        (lambda: collapse(randn(2, 4, 8), torch.ones(2, 3)), r"got \(2, 3\)"),
        (lambda: collapse(randn(4, 2, 8).transpose(0, 1), torch.ones(2, 4)), "side by side, got strides"),
        (lambda: hyper_coefficients(randn(1, 4, 8), *weights(9), 20, HC_EPS), r"got \(24, 36\)"),
        (lambda: hyper_coefficients(randn(1, 4, 8), *weights(8), 0, HC_EPS), "got 0"),
    ],
)
def test_bad_arguments_are_refused_with_their_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(LaunchRefusedError, match=message):
        call()
