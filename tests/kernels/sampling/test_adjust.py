"""Penalties, biases, masks and log-probabilities: what was asked for, to the bit, and nothing else."""

import numpy as np
import pytest
import torch
from epdserve.kernels.sampling import add_bias, forbid, log_probs, penalize, top_log_probs
from support.kernel_rows import ROWS, assert_rows_independent, bits, generator, randn
from torch import Tensor


def pairs(rows: int, vocabulary: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Some tokens of each row, no pair twice."""
    chosen = torch.rand(rows, vocabulary, generator=generator(seed)) < 0.2
    row, token = chosen.nonzero(as_tuple=True)
    return row, token


def test_penalties_are_those_of_the_definition() -> None:
    logits = torch.tensor([[2.0, -2.0, 0.5, 1.0], [2.0, -2.0, 0.5, 1.0]])
    row, token = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 3])
    count = torch.tensor([3, 1, 0, 2])
    result = penalize(
        logits,
        row,
        token,
        count,
        torch.tensor([0.5, -1.0]),
        torch.tensor([0.25, 0.0]),
        torch.tensor([2.0, 1.0]),
    )
    assert result.tolist() == [
        [2.0 / 2 - 0.25 * 3 - 0.5, -2.0 * 2 - 0.25 - 0.5, 0.5 / 2, 1.0],
        [2.0, -2.0, 0.5, 1.0 + 1.0],
    ]
    assert logits[0, 0] == 2.0


def test_tokens_that_are_not_listed_keep_their_bits() -> None:
    logits = randn(5, 60)
    row, token = pairs(5, 60)
    ones = torch.ones(5)
    result = penalize(logits, row, token, torch.ones(len(row)), ones, ones, ones * 1.3)
    listed = torch.zeros(5, 60, dtype=torch.bool)
    listed[row, token] = True
    assert torch.equal(bits(result)[~listed], bits(logits)[~listed])
    assert (result[listed] < logits[listed]).all()


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    logits = torch.zeros(2, 4)
    result = add_bias(
        logits, torch.tensor([0, 1, 1]), torch.tensor([1, 0, 3]), torch.tensor([2.5, -100.0, float("-inf")])
    )
    assert result.tolist() == [[0.0, 2.5, 0.0, 0.0], [-100.0, 0.0, 0.0, float("-inf")]]


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 97, 512])
def test_mask_keeps_what_it_allows(vocabulary: int) -> None:
    allowed = torch.rand(3, vocabulary, generator=generator(5)) < 0.5
    padded = np.zeros((3, -(-vocabulary // 32) * 32), dtype=np.uint8)
    padded[:, :vocabulary] = allowed.numpy()
    words = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view("<i4").copy())
    logits = randn(5, vocabulary)
    result = forbid(logits, torch.tensor([4, 0, 2]), words)
    for n, row in enumerate((4, 0, 2)):
        assert torch.equal(bits(result[row])[allowed[n]], bits(logits[row])[allowed[n]])
        assert torch.isneginf(result[row][~allowed[n]]).all()
    assert torch.equal(result[[1, 3]], logits[[1, 3]])


def test_top_log_probs_are_sorted_and_ties_go_to_the_lower_index() -> None:
    logits = torch.tensor([[0.0, -0.0, 3.0, -5.0, 3.0], [-1.0, -1.0, -1.0, float("-inf"), -2.0]])
    of_token, ids, values = top_log_probs(logits, torch.tensor([3, 4]), top=4)
    assert ids.tolist() == [[2, 4, 0, 1], [0, 1, 2, 4]]
    whole = log_probs(logits)
    assert torch.equal(of_token, torch.stack([whole[0, 3], whole[1, 4]]))
    assert torch.equal(values, whole.gather(1, ids))


def test_no_alternatives_and_no_rows_are_legal() -> None:
    of_token, ids, values = top_log_probs(randn(3, 7), torch.tensor([0, 1, 2]), top=0)
    assert (of_token.shape, ids.shape, values.shape) == ((3,), (3, 0), (3, 0))
    none = torch.empty(0, dtype=torch.int64)
    assert penalize(randn(2, 5), none, none, none, *[torch.ones(2)] * 3).equal(randn(2, 5))
    assert forbid(randn(2, 5), none, torch.empty(0, 1, dtype=torch.int32)).equal(randn(2, 5))


@pytest.mark.parametrize("vocabulary", [1, 97, 600])
def test_rows_are_independent(vocabulary: int) -> None:
    draw = generator(4)

    def adjusted(logits: Tensor, count: Tensor, penalty: Tensor, words: Tensor) -> tuple[Tensor, ...]:
        rows = torch.arange(len(logits))
        row, token = (count >= 0).nonzero(as_tuple=True)
        changed = penalize(
            logits, row, token, count[row, token], penalty[:, 0], penalty[:, 1], penalty[:, 2] + 0.5
        )
        changed = forbid(add_bias(changed, row, token, penalty[row, 1] * 3), rows, words)
        return changed, *top_log_probs(logits, token.new_zeros(len(logits)), top=min(5, vocabulary))

    assert_rows_independent(
        adjusted,
        randn(ROWS, vocabulary),
        torch.randint(-9, 4, (ROWS, vocabulary), generator=draw),
        torch.rand(ROWS, 3, generator=draw),
        torch.randint(-(2**31), 2**31, (ROWS, -(-vocabulary // 32)), generator=draw, dtype=torch.int64).int(),
    )
