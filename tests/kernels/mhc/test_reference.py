"""Hyper-connections against the golden vectors and the closed forms of spec/backbone.md 9.1."""

import pytest
import torch
from epdserve.kernels.mhc import coefficients_from_mixes, collapse, expand, hyper_coefficients, sinkhorn
from support.kernel_rows import ROWS, assert_rows_independent, block, randn

ITERS, EPS = 20, 1e-6


def test_coefficients_of_given_mixes_are_the_golden_ones() -> None:
    golden = block("hyper_connection")
    pre, post, comb = coefficients_from_mixes(golden["mixes"], golden["scale"], golden["base"], 4, ITERS, EPS)
    torch.testing.assert_close(pre, golden["pre"], atol=1e-6, rtol=0)
    torch.testing.assert_close(post, golden["post"], atol=1e-6, rtol=0)
    torch.testing.assert_close(comb, golden["comb"], atol=1e-6, rtol=0)
    torch.testing.assert_close(comb.double(), golden["comb_float64"], atol=1e-6, rtol=0)


def test_a_whole_step_is_the_golden_one() -> None:
    golden = block("hyper_connection")
    streams = golden["step.stream"]
    pre, post, comb = hyper_coefficients(
        streams, golden["step.fn"], golden["scale"], golden["base"], ITERS, EPS
    )
    torch.testing.assert_close(pre, golden["step.pre"], atol=1e-6, rtol=0)
    torch.testing.assert_close(post, golden["step.post"], atol=1e-6, rtol=0)
    torch.testing.assert_close(comb, golden["step.comb"], atol=1e-6, rtol=0)
    of_mixes = coefficients_from_mixes(golden["step.mixes"], golden["scale"], golden["base"], 4, ITERS, EPS)
    for found, projected in zip((pre, post, comb), of_mixes, strict=True):
        torch.testing.assert_close(found, projected, atol=1e-6, rtol=0)
    collapsed = collapse(streams, golden["step.carried_pre"])
    torch.testing.assert_close(collapsed, golden["step.collapsed"], atol=1e-6, rtol=0)
    expanded = expand(streams, golden["step.sublayer_out"], post, comb)
    torch.testing.assert_close(expanded, golden["step.new_stream"], atol=3e-6, rtol=0)


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 5])
def test_sinkhorn_is_the_plain_alternation(copies: int) -> None:
    mix = randn(11, copies, copies).double() * 3
    expected = mix.softmax(-1) + EPS
    expected = expected / (expected.sum(1, keepdim=True) + EPS)
    for _ in range(ITERS - 1):
        expected = expected / (expected.sum(2, keepdim=True) + EPS)
        expected = expected / (expected.sum(1, keepdim=True) + EPS)
    torch.testing.assert_close(sinkhorn(mix.float(), ITERS, EPS).double(), expected, atol=1e-5, rtol=0)


def test_sinkhorn_columns_sum_to_one_and_rows_nearly_do() -> None:
    result = sinkhorn(randn(50, 4, 4), ITERS, EPS)
    torch.testing.assert_close(result.sum(1), torch.ones(50, 4), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.sum(2), torch.ones(50, 4), atol=1e-2, rtol=0)


def test_extreme_logits_stay_finite() -> None:
    mix = randn(9, 4, 4) * 1e4
    assert sinkhorn(mix, ITERS, EPS).isfinite().all()
    pre, post, comb = coefficients_from_mixes(
        randn(9, 24) * 1e4, torch.ones(3), torch.zeros(24), 4, ITERS, EPS
    )
    assert all(part.isfinite().all() for part in (pre, post, comb))
    assert pre.min() >= EPS
    assert pre.max() <= 1 + 2 * EPS
    assert post.min() >= 0
    assert post.max() <= 2


def test_equal_copies_collapse_to_themselves_under_the_identity_mix() -> None:
    token = randn(5, 32)
    streams = token.unsqueeze(1).expand(-1, 4, -1).contiguous()
    identity = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(5, 4)
    assert torch.equal(collapse(streams, identity), token)


def test_expand_contracts_over_the_row_index() -> None:
    streams, comb = randn(1, 2, 8), torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    result = expand(streams, torch.zeros(1, 8), torch.ones(1, 2), comb)
    assert torch.equal(result[0, 1], streams[0, 0])
    assert not result[0, 0].any()


def test_bfloat16_streams_are_cast_once() -> None:
    streams, out = randn(3, 4, 32).bfloat16(), randn(3, 32, seed=1).bfloat16()
    pre, post, comb = randn(3, 4).abs(), randn(3, 4).abs(), randn(3, 4, 4).abs()
    assert torch.equal(collapse(streams, pre), collapse(streams.float(), pre).bfloat16())
    assert torch.equal(
        expand(streams, out, post, comb), expand(streams.float(), out.float(), post, comb).bfloat16()
    )


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9])
def test_any_number_of_tokens_works(tokens: int) -> None:
    streams, fn = randn(tokens, 4, 32), randn(24, 128, seed=1)
    pre, post, comb = hyper_coefficients(streams, fn, torch.ones(3), torch.zeros(24), ITERS, EPS)
    assert (pre.shape, post.shape, comb.shape) == ((tokens, 4), (tokens, 4), (tokens, 4, 4))
    assert collapse(streams, pre).shape == (tokens, 32)
    assert expand(streams, randn(tokens, 32), post, comb).shape == streams.shape


@pytest.mark.parametrize(("copies", "channels"), [(4, 32), (2, 33), (3, 24)])
def test_rows_are_independent(copies: int, channels: int) -> None:
    columns = copies * (copies + 2)
    fn, scale, base = randn(columns, copies * channels, seed=1), randn(3, seed=2), randn(columns, seed=3)
    streams = randn(ROWS, copies, channels)
    most = 70 if copies == 4 else 13
    assert_rows_independent(
        lambda rows: hyper_coefficients(rows, fn, scale, base, ITERS, EPS), streams, most=most
    )
    pre, post, comb = hyper_coefficients(streams, fn, scale, base, ITERS, EPS)
    assert_rows_independent(collapse, streams, pre)
    assert_rows_independent(expand, streams, randn(ROWS, channels), post, comb)
