"""Top-k and candidate blocks in Triton's interpreter; chunks are shrunk to a few scores."""

import pytest
import torch
from epdserve.kernels.indexer.reference import candidate_mask_ref, top_entries_ref
from epdserve.kernels.indexer.select import block_max, candidate_blocks, top_entries, top_entries_in_chunks
from epdserve.kernels.launch import LaunchRefusedError
from support.kernel_rows import generator, randn
from support.triton_rows import assert_row_bits, assert_same_bits
from torch import Tensor

K, CHUNK = 5, 16


def coarse(rows: int, entries: int, seed: int = 0) -> Tensor:
    """Scores with many ties, both zeros, and infinities."""
    score = (randn(rows, entries, seed=seed) * 2).round() / 2
    draw = torch.rand(rows, entries, generator=generator(seed + 1))
    return (
        score.masked_fill(draw > 0.9, float("-inf"))
        .masked_fill(draw < 0.05, float("inf"))
        .masked_fill((draw > 0.4) & (draw < 0.5), -0.0)
    )


@pytest.mark.parametrize("entries", [1, K - 1, K, K + 1, CHUNK, CHUNK + 1, 4 * CHUNK + 3])
def test_top_entries_are_those_of_the_reference(entries: int) -> None:
    score = coarse(4, entries)
    visible = torch.tensor([entries, max(0, entries - 1), min(entries, K), min(entries, K + 1)])
    assert_same_bits(
        top_entries_in_chunks(score, visible, K, chunk=CHUNK), top_entries_ref(score, visible, K)
    )


def test_no_row_and_no_entry_are_legal() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert top_entries_in_chunks(torch.zeros(0, 9), none, K, chunk=CHUNK).shape == (0, K)
    got = top_entries_in_chunks(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32), K, chunk=CHUNK)
    assert torch.equal(got, torch.full((2, K), -1))


def test_the_chunk_does_not_change_the_choice_and_rows_may_have_gaps() -> None:
    score = coarse(2, 100)[:, 3:90]
    visible = torch.tensor([87, 50])
    expected = top_entries_ref(score, visible, K)
    for chunk in (16, 128):
        assert_same_bits(top_entries_in_chunks(score, visible, K, chunk=chunk), expected)


def test_a_choice_depends_on_its_row_alone() -> None:
    visible = torch.tensor([20, 3, 17])
    assert_row_bits(lambda s, v: top_entries_in_chunks(s, v, K, chunk=CHUNK), coarse(3, 20), visible)


def test_a_nan_is_best_and_minus_infinity_is_never_chosen() -> None:
    score = torch.full((1, 12), float("-inf"))
    score[0, 7], score[0, 3] = float("nan"), 1.0
    assert top_entries_in_chunks(score, torch.tensor([12]), K, chunk=CHUNK).tolist() == [[3, 7, -1, -1, -1]]
    assert top_entries_in_chunks(score, torch.tensor([12]), 1, chunk=CHUNK).tolist() == [[7]]


@pytest.mark.parametrize("entries", [1, 4, 5, 33])
def test_candidate_blocks_cover_the_reference_mask(entries: int) -> None:
    """Pool of 4 blocks of 4: lengths of the pool - 1, the pool, and + 1 are 15, 16, 17 entries."""
    score = coarse(5, entries)
    visible = torch.tensor([entries, 0, *(min(entries, n) for n in (15, 16, 17))])
    blocks = candidate_blocks(score, visible, 4, 4, chunk=CHUNK)
    mask = torch.zeros(5, -(-entries // 4) + 1, dtype=torch.bool)
    mask.scatter_(1, blocks.masked_fill(blocks < 0, mask.shape[1] - 1), True)
    covered = mask[:, :-1].repeat_interleave(4, dim=1)[:, :entries]
    assert torch.equal(covered, candidate_mask_ref(score, visible, 4, 4))
    assert bool((blocks.masked_fill(blocks < 0, 10_000).diff(dim=1) >= 0).all())


def test_block_max_sees_visible_scores_only() -> None:
    score = torch.tensor([[1.0, 5.0, 2.0, 3.0, 9.0]])
    assert block_max(score, torch.tensor([3]), 2).tolist() == [[5.0, float("inf"), float("-inf")]]
    assert block_max(score, torch.tensor([0]), 2).tolist() == [[float("-inf")] * 3]


def test_bad_arguments_are_refused_with_their_value() -> None:
    score, visible = torch.zeros(2, 8), torch.tensor([1, 2])
    with pytest.raises(LaunchRefusedError, match=r"got torch\.float64"):
        top_entries(score.double(), visible, 2)
    with pytest.raises(LaunchRefusedError, match="cannot choose 9 in chunks of 16"):
        top_entries_in_chunks(score, visible, 9, chunk=16)
    with pytest.raises(LaunchRefusedError, match=r"visible_R must have the shape \(2,\), got \(1,\)"):
        top_entries(score, visible[:1], 2)
    with pytest.raises(LaunchRefusedError, match="strides"):
        top_entries(torch.zeros(8, 2).t(), visible, 2)
    with pytest.raises(LaunchRefusedError, match="got 6"):
        block_max(score, visible, 6)


def test_rows_beyond_two_billion_scores_are_reached() -> None:
    """Row 2 starts at score 2**31; only the scores in use are ever touched."""
    far = torch.empty_strided((3, 20), (1 << 30, 1))
    far.copy_(coarse(3, 20))
    visible = torch.tensor([20, 7, 19])
    assert_same_bits(top_entries_in_chunks(far, visible, K, chunk=CHUNK), top_entries_ref(far, visible, K))
