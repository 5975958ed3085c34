"""N-gram rows in Triton's interpreter."""

import pytest
import torch
from epdserve.kernels.engram.hash import ngram_rows
from epdserve.kernels.engram.reference import ngram_rows_ref
from epdserve.kernels.launch import LaunchRefusedError
from support.kernel_rows import generator
from support.triton_rows import assert_row_bits, assert_same_bits

MULTIPLIERS = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
PRIMES = torch.tensor([[16000057, 16000079, 16000081], [61, 67, 71], [73, 79, 83]])
OFFSETS = torch.arange(9) * 16_000_100
PAD = 3


def compressed(tokens: int) -> torch.Tensor:
    ids = torch.randint(0, 99_092, (tokens, 4), generator=generator())
    blocked = torch.rand(tokens, 4, generator=generator(1)) < 0.2
    return ids.masked_fill(blocked, -1)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 70])
def test_rows_are_those_of_the_reference(tokens: int) -> None:
    arguments = (compressed(tokens), PAD, MULTIPLIERS, PRIMES, OFFSETS)
    assert_same_bits(ngram_rows(*arguments), ngram_rows_ref(*arguments))


def test_a_block_hides_everything_behind_it() -> None:
    ids = torch.tensor([[5, -1, 7, 8], [5, -1, 9, -1]])
    rows = ngram_rows(ids, PAD, MULTIPLIERS, PRIMES, OFFSETS)
    assert torch.equal(rows[0], rows[1])


def test_a_token_depends_on_its_own_row_alone() -> None:
    assert_row_bits(lambda ids: ngram_rows(ids, PAD, MULTIPLIERS, PRIMES, OFFSETS), compressed(40))


def test_bad_arguments_are_refused_with_their_value() -> None:
    with pytest.raises(LaunchRefusedError, match=r"got \(2, 3\)"):
        ngram_rows(compressed(2)[:, :3], PAD, MULTIPLIERS, PRIMES, OFFSETS)
    with pytest.raises(LaunchRefusedError, match="got -1"):
        ngram_rows(compressed(2), -1, MULTIPLIERS, PRIMES, OFFSETS)
    with pytest.raises(LaunchRefusedError, match=r"got torch\.int32"):
        ngram_rows(compressed(2), PAD, MULTIPLIERS.int(), PRIMES, OFFSETS)
