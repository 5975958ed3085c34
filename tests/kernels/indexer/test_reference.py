"""Index scores, the choice of entries and the candidate pool."""

import pytest
import torch
from epdserve.kernels.indexer import candidate_mask, score_entries, top_entries
from support.kernel_rows import assert_rows_independent, block, generator, randn, threads
from torch import Tensor

MINUS_INF = float("-inf")


def golden_scores(suffix: str = "") -> Tensor:
    golden = block("indexer")
    weight = golden[f"w{suffix}"] * (32**-0.5 * 8**-0.5)
    return score_entries(golden[f"q{suffix}"][None], weight[None], golden["k"][None])[0]


def test_scores_choice_and_candidates_are_the_golden_ones() -> None:
    golden = block("indexer")
    k, blocks, block_size = golden["params"].tolist()
    score, visible = golden_scores(), torch.arange(1, 49)
    seen = golden["score"] > MINUS_INF
    torch.testing.assert_close(score[seen], golden["score"][seen], atol=2e-5, rtol=0)
    assert torch.equal(top_entries(score, visible, k), golden["topk"].long())
    mask = candidate_mask(score, visible, blocks, block_size)
    assert torch.equal(mask, golden["candidate_mask"].bool())
    inside = golden_scores("2").masked_fill(~mask, MINUS_INF)
    seen = golden["score_in_candidates"] > MINUS_INF
    torch.testing.assert_close(inside[seen], golden["score_in_candidates"][seen], atol=2e-5, rtol=0)
    assert torch.equal(top_entries(inside, visible, k), golden["topk_in_candidates"].long())


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 16])
def test_scores_are_the_formula_in_float64(heads: int) -> None:
    q, w, k = randn(2, 3, heads, 32), randn(2, 3, heads, seed=1), randn(2, 21, 32, seed=2)
    product = torch.einsum("sqhd,sed->sqhe", q.double(), k.double()).relu()
    expected = torch.einsum("sqhe,sqh->sqe", product, w.double())
    torch.testing.assert_close(score_entries(q, w, k).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("heads", "channels"), [(16, 64), (4, 32)])
def test_a_score_depends_on_its_query_and_entry_only(heads: int, channels: int) -> None:
    q, w, k = randn(3, 40, heads, channels), randn(3, 40, heads, seed=1), randn(3, 301, channels, seed=2)
    whole = score_entries(q, w, k)
    for count in (1, 2):
        with threads(count):
            for entries in [*range(1, 36), 63, 64, 65, 128, 300]:
                for queries in (1, 2, 5, 17):
                    rows = slice(3, 3 + queries)
                    part = score_entries(q[:, rows], w[:, rows], k[:, :entries])
                    assert torch.equal(part, whole[:, rows, :entries]), (count, entries, queries)
                    alone = score_entries(q[1:2, rows], w[1:2, rows], k[1:2, :entries])
                    assert torch.equal(alone, part[1:2]), (count, entries, queries)


@pytest.mark.parametrize("max_bytes", [1, 4000, 20_000, 1 << 30])
def test_chunks_do_not_show(max_bytes: int) -> None:
    q, w, k = randn(2, 13, 4, 32), randn(2, 13, 4, seed=1), randn(2, 50, 32, seed=2)
    assert torch.equal(score_entries(q, w, k, max_bytes=max_bytes), score_entries(q, w, k))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=str)
def test_no_sequence_query_or_entry_is_legal(shape: tuple[int, int, int]) -> None:
    sequences, queries, entries = shape
    score = score_entries(
        randn(sequences, queries, 4, 32), randn(sequences, queries, 4), randn(sequences, entries, 32)
    )
    assert score.shape == shape


def naive_top(score: list[float], visible: int, k: int) -> list[int]:
    seen = [index for index in range(min(visible, len(score))) if score[index] > MINUS_INF]
    best = sorted(seen, key=lambda index: (-score[index], index))[:k]
    return sorted(best) + [-1] * (k - len(best))


@pytest.mark.parametrize("entries", [0, 1, 4, 5, 6, 40, 300])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_top_entries_is_the_naive_choice(entries: int, k: int) -> None:
    draw = generator(entries)
    score = torch.randint(-4, 4, (25, entries), generator=draw).float() / 2  # many ties
    score[torch.rand(25, entries, generator=draw) < 0.2] = MINUS_INF
    score[torch.rand(25, entries, generator=draw) < 0.1] = -0.0
    visible = torch.randint(0, entries + 2, (25,), generator=draw)
    expected = [naive_top(row, seen, k) for row, seen in zip(score.tolist(), visible.tolist(), strict=True)]
    assert top_entries(score, visible, k).tolist() == expected


def test_the_two_zeros_tie() -> None:
    score = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert top_entries(score, torch.tensor([5]), 2).tolist() == [[0, 1]]


def test_the_float_order_of_keys_covers_the_extremes() -> None:
    score = torch.tensor([[-3e38, 3e38, -1e-40, 1e-40, float("inf"), -1.0, 1.0]])
    assert top_entries(score, torch.tensor([7]), 3).tolist() == [[1, 4, 6]]
    assert top_entries(score, torch.tensor([7]), 6).tolist() == [[1, 2, 3, 4, 5, 6]]


def naive_candidates(score: list[float], visible: int, blocks: int, size: int) -> list[bool]:
    visible = min(visible, len(score))
    value = {}
    for number in range(-(-len(score) // size)):
        seen = [score[i] for i in range(number * size, min((number + 1) * size, visible))]
        value[number] = max(seen, default=MINUS_INF)
    if visible:
        value[(visible - 1) // size] = float("inf")
    ranked = sorted((n for n in value if value[n] > MINUS_INF), key=lambda n: (-value[n], n))[:blocks]
    return [index // size in ranked for index in range(len(score))]


@pytest.mark.parametrize("entries", [0, 1, 7, 8, 9, 63, 64, 65])
@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (3, 4), (4, 8), (100, 8)])
def test_candidates_are_the_naive_choice(entries: int, blocks: int, size: int) -> None:
    draw = generator(entries)
    score = torch.randint(-4, 4, (20, entries), generator=draw).float()
    score[torch.rand(20, entries, generator=draw) < 0.3] = MINUS_INF
    visible = torch.randint(0, entries + 2, (20,), generator=draw)
    expected = [
        naive_candidates(row, seen, blocks, size)
        for row, seen in zip(score.tolist(), visible.tolist(), strict=True)
    ]
    assert candidate_mask(score, visible, blocks, size).tolist() == expected


def test_rows_are_independent() -> None:
    score, visible = randn(160, 130), torch.randint(0, 131, (160,), generator=generator(7))
    assert_rows_independent(lambda s, v: top_entries(s, v, 16), score, visible)
    assert_rows_independent(lambda s, v: candidate_mask(s, v, 8, 4), score, visible)
