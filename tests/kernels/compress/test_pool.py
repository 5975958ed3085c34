"""Ratio-2 pooling in Triton's interpreter: prefill, decode with the open pair, and both at once."""

import pytest
import torch
from epdserve.kernels.compress.pool import pool_entries, pool_pairs
from epdserve.kernels.compress.reference import pool_entries_ref, pool_pairs_ref
from epdserve.kernels.launch import LaunchRefusedError
from support.kernel_rows import randn
from support.triton_rows import assert_row_bits, assert_same_bits

ULP = 2.0**-23
NONE = torch.empty(0, dtype=torch.int64)


def assert_close(got: torch.Tensor, expected: torch.Tensor, *contents: torch.Tensor) -> None:
    """The exponential, the sum, the division and the product of either weight round once: 4 ulp of either value."""
    bound = 4 * ULP * sum((content.abs() for content in contents), torch.zeros_like(got)) + 1e-38
    assert bool(((got - expected).abs() <= bound).all())


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 33), (2, 512), (1, 1025)], ids=str)
def test_pairs_are_those_of_the_reference(shape: tuple[int, int]) -> None:
    c0, z0, c1, z1 = (randn(*shape, seed=seed) for seed in range(4))
    assert_close(pool_pairs(c0, 4 * z0, c1, 4 * z1), pool_pairs_ref(c0, 4 * z0, c1, 4 * z1), c0, c1)


def test_equal_gates_give_the_mean_and_an_infinite_gate_takes_all() -> None:
    c0, c1, zero = randn(1, 16), randn(1, 16, seed=1), torch.zeros(1, 16)
    assert torch.equal(pool_pairs(c0, zero, c1, zero), 0.5 * c0 + 0.5 * c1)
    assert torch.equal(pool_pairs(c0, zero + float("inf"), c1, zero), c0)
    assert torch.equal(pool_pairs(c0, zero, c1, zero + 1000), c1)
    assert bool(pool_pairs(c0, zero + float("inf"), c1, zero + float("inf")).isnan().all())


def test_a_step_of_prefill_and_decode_rows() -> None:
    """Row 0 closes what slot 2 kept; rows 1, 2 are a pair; row 3 stays open in the slot that row 0 read."""
    content, gate = randn(4, 24), randn(4, 24, seed=1)
    slots = randn(3, 2, 24, seed=2)
    arguments = [torch.tensor(x) for x in ([-5, 1], [2, -1], [0, 2], [2], [3])]
    got_slots, expected_slots = slots.clone(), slots.clone()
    got = pool_entries(content, gate, got_slots, *arguments)
    expected = pool_entries_ref(content, gate, expected_slots, *arguments)
    first = torch.stack((slots[2, 0], content[1]))
    assert_close(got, expected, first, content[[0, 2]])
    assert_close(got[0], pool_pairs_ref(*slots[2], content[0], gate[0]), slots[2, 0], content[0])
    assert_same_bits(got_slots, expected_slots)
    assert_same_bits(got_slots[2], torch.stack((content[3], gate[3])))


def test_a_step_that_closes_nothing_only_keeps() -> None:
    slots = torch.zeros(2, 2, 8)
    got = pool_entries(
        randn(1, 8), randn(1, 8), slots, NONE, NONE, NONE, torch.tensor([1]), torch.tensor([0])
    )
    assert got.shape == (0, 8)
    assert_same_bits(slots[1, 0], randn(8))


def test_decoding_token_by_token_gives_what_one_prefill_gives() -> None:
    content, gate = randn(6, 16), randn(6, 16, seed=1)
    even, odd = torch.arange(0, 6, 2), torch.arange(1, 6, 2)
    whole = pool_entries(content, gate, torch.zeros(1, 2, 16), even, torch.full((3,), -1), odd, NONE, NONE)
    slots, steps = torch.zeros(1, 2, 16), []
    zero = torch.tensor([0])
    for position in range(6):
        row = slice(position, position + 1)
        closes = (zero, zero, zero, NONE, NONE) if position % 2 else (NONE, NONE, NONE, zero, zero)
        steps.append(pool_entries(content[row], gate[row], slots, *closes))
    assert_same_bits(torch.cat(steps), whole)


def test_rows_with_gaps_and_independent_rows() -> None:
    both = randn(7, 40)
    content, gate = both[:, :20], both[:, 20:]
    assert_row_bits(pool_pairs, content, gate, gate, content)


def test_bad_arguments_are_refused_with_their_value() -> None:
    content, slots = randn(2, 8), torch.zeros(1, 2, 8)
    one = torch.tensor([1])
    with pytest.raises(LaunchRefusedError, match="closing holds 2, of 2"):
        pool_entries(content, content, slots, one, -one, one + 1, NONE, NONE)
    with pytest.raises(LaunchRefusedError, match="slot holds 1, of 1"):
        pool_entries(content, content, slots, one, one, one, NONE, NONE)
    with pytest.raises(LaunchRefusedError, match="keep_slot holds 1, of 1"):
        pool_entries(content, content, slots, NONE, NONE, NONE, one, one)
    with pytest.raises(LaunchRefusedError, match=r"got torch\.bfloat16"):
        pool_pairs(content.bfloat16(), content, content, content)


def test_a_kernel_never_follows_an_index_that_was_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epdserve.kernels.compress.pool.check_indices", lambda *_, **__: None)
    slots = torch.zeros(1, 2, 8)
    far = torch.tensor([2**30])
    got = pool_entries(randn(2, 8), randn(2, 8), slots, far, far, far, far, far)
    assert not got.any()
    assert not slots.any()
