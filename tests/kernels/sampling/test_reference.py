"""Draws: right distribution, right filters, and nothing but the row itself decides."""

import math

import pytest
import torch
from epdserve.kernels.sampling import log_probs, sample
from epdserve.kernels.sampling.reference import uniform_ref
from support.kernel_rows import ROWS, assert_rows_independent, generator, randn
from torch import Tensor


def draw(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Tensor = 0,
    position: int | Tensor = 0,
) -> Tensor:
    rows = logits.shape[0]
    return sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.as_tensor(seed).expand(rows),
        torch.as_tensor(position).expand(rows),
    )


def frequencies(logits: Tensor, count: int, **options: float) -> Tensor:
    """Share of each token in draws of one row at positions 0 .. count-1."""
    tokens = draw(logits.expand(count, -1), position=torch.arange(count), **options)  # type: ignore[arg-type]
    return tokens.bincount(minlength=logits.shape[1]).double()


def assert_chi_square(observed: Tensor, probability: Tensor) -> None:
    """Pearson's statistic below its 1 - 1e-6 quantile (Wilson and Hilferty's approximation)."""
    assert not observed[probability == 0].any()
    kept = probability > 0
    expected = probability[kept] * observed.sum()
    statistic = float(((observed[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 4.75 * math.sqrt(spread)) ** 3, statistic


LOGITS = torch.tensor([[1.0, -0.5, 2.0, 0.0, 0.3, -3.0, 1.0, 0.7]])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_plain_draws_follow_the_softmax(temperature: float) -> None:
    expected = (LOGITS[0].double() / temperature).softmax(0)
    assert_chi_square(frequencies(LOGITS, 20_000, temperature=temperature), expected)


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution left after the filters, token by token."""
    probability = (logits.double() / temperature).softmax(0).tolist()
    order = sorted(range(len(probability)), key=lambda token: (-probability[token], token))
    order = order[: top_k or len(order)]
    mass, kept, before = sum(probability[token] for token in order), [], 0.0
    for token in order:
        enough = before >= top_p * mass or probability[token] < min_p * probability[order[0]]
        if kept and enough:
            break
        kept.append(token)
        before += probability[token]
    result = torch.zeros(len(probability), dtype=torch.float64)
    for token in kept:
        result[token] = probability[token] / before
    return result


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (3, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.2),
        (5, 0.8, 0.15),
        (1, 1.0, 0.0),
        (0, 0.0, 0.0),
        (99, 0.5, 0.0),
    ],
)
def test_filtered_draws_follow_the_filtered_distribution(top_k: int, top_p: float, min_p: float) -> None:
    expected = filtered(LOGITS[0], 1.3, top_k, top_p, min_p)
    observed = frequencies(LOGITS, 10_000, temperature=1.3, top_k=top_k, top_p=top_p, min_p=min_p)
    if (expected > 0).sum() == 1:
        assert observed.argmax() == expected.argmax()
        assert observed.max() == observed.sum()
    else:
        assert_chi_square(observed, expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(600, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.22), (600, 0.98, 0.0)]
)
def test_filters_that_keep_more_tokens_than_were_put_in_order_first(
    top_k: int, top_p: float, min_p: float
) -> None:
    logits = randn(1, 900) * 0.3
    expected = filtered(logits[0], 1.0, top_k, top_p, min_p)
    assert (expected > 0).sum() > 512
    assert_chi_square(frequencies(logits, 5_000, top_k=top_k, top_p=top_p, min_p=min_p), expected)


def test_temperature_zero_is_the_best_token_and_ties_go_to_the_lowest() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    assert draw(logits, temperature=0.0).tolist() == [1, 0]


def test_cold_and_warm_rows_share_a_call() -> None:
    logits = LOGITS.expand(3, -1)
    temperature = torch.tensor([0.0, 1.0, 0.0])
    none, one = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    tokens = sample(logits, temperature, none, one, one * 0, none + 5, torch.tensor([1, 2, 3]))
    assert tokens[0] == tokens[2] == 2
    assert tokens[1] == draw(LOGITS, seed=5, position=2)


def test_seed_and_position_decide_and_nothing_else() -> None:
    logits = randn(1, 500).expand(200, -1)
    first = draw(logits, seed=7, position=torch.arange(200))
    assert torch.equal(first, draw(logits, seed=7, position=torch.arange(200)))
    assert not torch.equal(first, draw(logits, seed=8, position=torch.arange(200)))
    assert first.unique().numel() > 50
    assert torch.equal(first[50:60], draw(logits[:10], seed=7, position=torch.arange(50, 60)))


def test_a_shift_of_all_logits_changes_no_draw() -> None:
    logits = torch.randint(-8, 8, (64, 50), generator=generator()).float()
    position = torch.arange(64)
    assert torch.equal(draw(logits, position=position), draw(logits + 16, position=position))


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((300, 6), float("-inf"))
    logits[:, [1, 4]] = torch.tensor([0.0, 1.0])
    for options in ({}, {"top_p": 0.99}, {"top_k": 5}):
        tokens = draw(logits, position=torch.arange(300), **options)  # type: ignore[arg-type]
        assert set(tokens.tolist()) == {1, 4}


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    seeds = torch.arange(-50, 50).repeat_interleave(1000)
    values = uniform_ref(seeds, torch.arange(1000).repeat(100))
    assert values.min() >= 0
    assert values.max() < 1
    assert_chi_square(values.mul(64).long().bincount(minlength=64).double(), torch.full((64,), 1 / 64.0))
    assert values.unique().numel() == len(values)
    pairs = (values[:-1].mul(8).long() * 8 + values[1:].mul(8).long()).bincount(minlength=64)
    assert_chi_square(pairs.double(), torch.full((64,), 1 / 64.0))


def test_extreme_seeds_work() -> None:
    seeds = torch.tensor([-(2**63), 2**63 - 1, 0, -1])
    assert uniform_ref(seeds, torch.tensor([0, 1 << 40, 5, 2**62])).unique().numel() == 4


@pytest.mark.parametrize("vocabulary", [1, 2, 97, 600])
def test_rows_are_independent(vocabulary: int) -> None:
    draw_from = generator(4)
    assert_rows_independent(
        sample,
        randn(ROWS, vocabulary),
        torch.rand(ROWS, generator=draw_from).sub(0.2).clamp(min=0),
        torch.randint(0, 9, (ROWS,), generator=draw_from).clamp(max=6) % 7,
        torch.rand(ROWS, generator=draw_from).mul(1.5).clamp(max=1.0),
        torch.rand(ROWS, generator=draw_from).sub(0.5).clamp(min=0) * 0.3,
        torch.randint(0, 1 << 40, (ROWS,), generator=draw_from),
        torch.randint(0, 1 << 20, (ROWS,), generator=draw_from),
    )


def test_log_probs_are_the_logarithm_of_the_softmax() -> None:
    logits = randn(3, 50).bfloat16()
    result = log_probs(logits)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.exp().sum(-1), torch.ones(3))
    torch.testing.assert_close(result, logits.float().log_softmax(-1))
