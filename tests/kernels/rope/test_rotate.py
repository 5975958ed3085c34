"""Rotary embedding in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.launch import LaunchRefusedError
from epdserve.kernels.rope.reference import apply_rope_inverse_ref, apply_rope_ref, rotations_ref
from epdserve.kernels.rope.rotate import apply_rope, apply_rope_in_place, apply_rope_inverse
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits, assert_same_bits


def angles(tokens: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rotations_ref(torch.arange(tokens) * 977, torch.logspace(0, -4, pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "shape", [(0, 3, 16), (1, 1, 64), (3, 5, 24), (2, 8, 512), (2, 65, 64), (4, 96)], ids=str
)
def test_bits_are_those_of_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = randn(*shape).to(dtype)
    cos, sin = angles(shape[0], 8)
    assert_same_bits(apply_rope(x, cos, sin), apply_rope_ref(x, cos, sin))
    assert_same_bits(apply_rope_inverse(x, cos, sin), apply_rope_inverse_ref(x, cos, sin))


@pytest.mark.parametrize("pairs", [1, 7, 8, 12])
def test_any_number_of_pairs_and_rows_with_gaps(pairs: int) -> None:
    x = randn(3, 4, 40)[:, 1:, 5:29]
    cos, sin = angles(3, pairs)
    expected, got = apply_rope_ref(x, cos, sin), apply_rope(x, cos, sin)
    if pairs % 8:  # the reference's processor fuses product and sum of those that fill no vector
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-7)
    else:
        assert_same_bits(got, expected)
    changed = apply_rope_in_place(x, cos, sin)
    assert changed is x
    assert_same_bits(changed.contiguous(), got)


def test_what_is_not_rotated_is_copied_even_if_infinite() -> None:
    x = torch.full((1, 2, 16), float("inf"))
    x[0, 1] = float("nan")
    cos, sin = angles(1, 2)
    assert_same_bits(apply_rope(x, cos, sin)[..., :12], x[..., :12])


def test_a_row_depends_on_itself_alone() -> None:
    cos, sin = angles(9, 8)
    assert_row_bits(apply_rope, randn(9, 3, 32), cos, sin)


def test_bad_arguments_are_refused_with_their_value() -> None:
    cos, sin = angles(2, 8)
    with pytest.raises(LaunchRefusedError, match=r"got \(3, 1, 64\)"):
        apply_rope(randn(3, 64), cos, sin)
    with pytest.raises(LaunchRefusedError, match="rotate 16 of 8 channels"):
        apply_rope(randn(2, 8), cos, sin)
    with pytest.raises(LaunchRefusedError, match=r"strides \(1, 2\)"):
        apply_rope(randn(2, 64), cos, sin.t().contiguous().t())
    with pytest.raises(LaunchRefusedError, match=r"got torch\.float64"):
        apply_rope(randn(2, 64).double(), cos, sin)
