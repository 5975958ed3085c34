"""What the tests of launchers share: bit patterns, and the check that a row depends on itself alone."""

from collections.abc import Callable

import torch
from torch import Tensor


def raw(x: Tensor) -> Tensor:
    """The bytes of a tensor, so that comparisons see the sign of zero and the bits of NaN."""
    return x.contiguous().view(torch.uint8) if x.dim() else x.reshape(1).view(torch.uint8)


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bits."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(raw(got), raw(expected)), f"{int((raw(got) != raw(expected)).sum())} bytes differ"


def assert_row_bits(function: Callable[..., Tensor | tuple[Tensor, ...]], *rows: Tensor) -> None:
    """A row's result is the same to the bit alone, in any part of the batch, and at any place in it.

    Args:
        function: Takes ``rows`` and returns tensors whose first dimension is the row.
        rows: Arguments, each with the same number of rows, at least 3.
    """
    total = rows[0].shape[0]
    expected = _tuple(function(*rows))
    order = torch.arange(total)
    choices = [
        order[:1],  # alone
        order[total - 1 :],
        order[1:],  # every row one place earlier, the first gone
        order.flip(0),  # every row elsewhere
        order[::2],
    ]
    for index in choices:
        for got, whole in zip(_tuple(function(*(row[index] for row in rows))), expected, strict=True):
            assert_same_bits(got, whole[index])


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
