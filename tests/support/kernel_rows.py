"""What the kernel tests share: golden building blocks, and the check that rows do not depend on one another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

BLOCKS = Path(__file__).parent.parent / "golden" / "blocks"
ROWS = 160  # rows of the product that smaller calls are compared with


@cache
def block(name: str) -> dict[str, Tensor]:
    """Arrays of one golden building block."""
    return load_file(BLOCKS / f"{name}.safetensors")


def bits(x: Tensor) -> Tensor:
    """Float32 as integers, so that comparisons see the sign of zero."""
    return x.contiguous().view(torch.int32)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many torch threads; products split their rows among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_rows_independent(
    function: Callable[..., Tensor | tuple[Tensor, ...]], *rows: Tensor, most: int = 70
) -> None:
    """Runs of 1 .. ``most`` rows, and random subsets, give the bits that all rows together give.

    With two threads, which only divide products among them here, fewer sizes are tried.

    Args:
        function: Takes ``rows`` and returns tensors whose first dimension is the row.
        rows: Arguments, each with the same number of rows.
    """
    draw = generator(99)
    total = rows[0].shape[0]
    subsets = [torch.randperm(total, generator=draw)[: 3 + 9 * i] for i in range(7)]
    with torch.inference_mode():
        expected = _tuple(function(*rows))
        for count, sizes in ((1, range(1, most + 1)), (2, [1, 2, 3, 5, 7, 8, 9, 11, 13, 33])):
            runs = [torch.arange(size) + (7 * size) % (total - size + 1) for size in sizes]
            with threads(count):
                for index in [*runs, *subsets]:
                    part = _tuple(function(*(row[index] for row in rows)))
                    for got, whole in zip(part, expected, strict=True):
                        assert torch.equal(got, whole[index]), (
                            f"{count} threads: {len(index)} rows from {index[0]} differ from themselves among {total}"
                        )


def _tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)
