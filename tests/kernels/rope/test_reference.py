"""Rotary embedding against the golden tables, and what a rotation must leave alone."""

import pytest
import torch
from epdserve.kernels.rope import YarnScaling, apply_rope, apply_rope_inverse, rope_frequencies, rotations
from support.kernel_rows import ROWS, assert_rows_independent, block, generator, randn

RELEASED_YARN = YarnScaling(factor=16.0, original_length=65536)
TABLES = {"window": (10000.0, None), "compressed": (160000.0, RELEASED_YARN)}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_the_golden_ones(name: str) -> None:
    golden = block("rope")
    frequency = rope_frequencies(64, *TABLES[name])
    torch.testing.assert_close(frequency, golden[f"{name}.inv_freq"], atol=0, rtol=1e-6)
    cos, sin = rotations(golden[f"{name}.rows"], golden[f"{name}.inv_freq"])
    torch.testing.assert_close(cos, golden[f"{name}.cos"], atol=2e-7, rtol=0)
    torch.testing.assert_close(sin, golden[f"{name}.sin"], atol=2e-7, rtol=0)
    # The product that is rounded to float32 is the right one: without it the far rows turn to other angles
    exact = golden[f"{name}.rows"].double()[:, None] * golden[f"{name}.inv_freq"].double()
    for function, of_exact in ((torch.cos, "cos_exact_product"), (torch.sin, "sin_exact_product")):
        torch.testing.assert_close(function(exact).float(), golden[f"{name}.{of_exact}"], atol=2e-7, rtol=0)
    assert (cos - golden[f"{name}.cos_exact_product"]).abs().max() > 1e-3


def test_rotation_and_back_are_the_golden_ones() -> None:
    golden = block("rope")
    angles = rotations(golden["apply.positions"], golden["compressed.inv_freq"])
    rotated = apply_rope(golden["apply.x"], *angles)
    torch.testing.assert_close(rotated, golden["apply.rotated"], atol=1e-6, rtol=0)
    torch.testing.assert_close(
        apply_rope_inverse(golden["apply.rotated"], *angles), golden["apply.back"], atol=1e-6, rtol=0
    )


def test_yarn_stretches_slow_pairs_and_leaves_fast_ones() -> None:
    plain, stretched = rope_frequencies(64, 160000.0), rope_frequencies(64, 160000.0, RELEASED_YARN)
    assert torch.equal(stretched[:16], plain[:16])  # pairs up to 15 turn often enough
    torch.testing.assert_close(stretched[25:], plain[25:] / 16, atol=0, rtol=1e-6)


def test_position_zero_rotates_nothing_and_unrotated_channels_are_untouched() -> None:
    x = randn(3, 2, 96)
    angles = rotations(torch.tensor([0, 5, 70000]), rope_frequencies(64, 10000.0))
    result = apply_rope(x, *angles)
    assert torch.equal(result[0], x[0])
    assert torch.equal(result[:, :, :32], x[:, :, :32])
    assert not torch.equal(result[1:, :, 32:], x[1:, :, 32:])


@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 16), (5, 3, 24), (5, 2, 3, 16)], ids=str)
def test_inverse_undoes_the_rotation(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    angles = rotations(torch.arange(shape[0]) * 977, rope_frequencies(16, 10000.0))
    back = apply_rope_inverse(apply_rope(x, *angles), *angles)
    torch.testing.assert_close(back, x, atol=1e-6, rtol=0)


def test_bfloat16_is_rotated_in_float32_and_cast_once() -> None:
    x = randn(4, 2, 32).bfloat16()
    angles = rotations(torch.arange(4) * 31, rope_frequencies(16, 10000.0))
    result = apply_rope(x, *angles)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, apply_rope(x.float(), *angles).bfloat16())


def test_the_input_is_left_alone_and_may_be_strided() -> None:
    wide = randn(4, 2, 64)
    before = wide.clone()
    angles = rotations(torch.arange(4) * 31, rope_frequencies(16, 10000.0))
    view = wide[..., 16:48]
    assert torch.equal(apply_rope(view, *angles), apply_rope(view.contiguous(), *angles))
    assert torch.equal(wide, before)


@pytest.mark.parametrize(("heads", "channels", "rotary"), [(1, 64, 16), (3, 96, 64), (2, 10, 6)])
def test_rows_are_independent(heads: int, channels: int, rotary: int) -> None:
    frequency = rope_frequencies(rotary, 160000.0)
    positions = torch.randint(0, 1 << 20, (ROWS,), generator=generator())
    assert_rows_independent(
        lambda x, position: apply_rope(x, *rotations(position, frequency)),
        randn(ROWS, heads, channels),
        positions,
    )


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="7"):
        rope_frequencies(7, 10000.0)
    with pytest.raises(ValueError, match="rotate 16 of 8"):
        apply_rope(torch.zeros(1, 8), torch.ones(1, 8), torch.zeros(1, 8))
    with pytest.raises(ValueError, match="factor=0"):
        YarnScaling(factor=0, original_length=64)
