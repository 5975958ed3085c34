"""Draft verification: what it must not change is the distribution of the tokens."""

import pytest
import torch
from epdserve.kernels.sampling.drafts import (
    Method,
    accept_greedy_ref,
    filtered_probs_ref,
    verify_drafts_ref,
)
from epdserve.kernels.sampling.reference import sample_ref
from support.kernel_rows import generator, randn

VOCABULARY = 4


def chain(seed: int, sharpness: float) -> torch.Tensor:
    """Next-token distribution after each token of a toy language."""
    return (randn(VOCABULARY, VOCABULARY, seed=seed) * sharpness).softmax(1)


def drafted(q: torch.Tensor, drafts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts after token 0, each drawn from the drafter's distribution after the one before."""
    draw = generator(11)
    tokens = [torch.zeros(rows, dtype=torch.int64)]
    for _ in range(drafts):
        tokens.append(torch.multinomial(q[tokens[-1]], 1, generator=draw).squeeze(1))
    path = torch.stack(tokens, 1)
    return path[:, 1:], q[path[:, :-1]]


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("method", ["token", "block"])
def test_pairs_of_tokens_are_distributed_as_without_drafts(method: Method, drafts: int) -> None:
    rows = 2000
    p, q = chain(1, 1.0).float(), chain(2, 1.0).float()
    draft, drafter = drafted(q, drafts, rows)
    path = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), draft], 1)
    accepted, token = verify_drafts_ref(
        p[path],
        drafter,
        draft,
        torch.full((rows,), drafts),
        torch.arange(rows),
        torch.zeros(rows, dtype=torch.int64),
        method,
    )
    first = torch.where(accepted > 0, draft[:, 0], token)
    second = torch.where(accepted > 1, draft[:, min(1, drafts - 1)], token)
    single = accepted == 0  # the next step draws the second token from the target
    second[single] = torch.multinomial(p[first[single]], 1, generator=generator(12)).squeeze(1)
    seen = torch.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2).double()
    expected = (p[0].double().unsqueeze(1) * p.double()).flatten() * rows
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 37.7  # 15 degrees of freedom, exceeded once in a thousand


def test_block_verification_accepts_no_fewer_tokens() -> None:
    p, q = chain(1, 1.5).float(), chain(2, 1.5).float()
    draft, drafter = drafted(q, 3, 1200)
    path = torch.cat([torch.zeros(1200, 1, dtype=torch.int64), draft], 1)
    lengths = {}
    for method in ("token", "block"):
        accepted, _ = verify_drafts_ref(
            p[path],
            drafter,
            draft,
            torch.full((1200,), 3),
            torch.arange(1200),
            torch.zeros(1200).long(),
            method,
        )
        lengths[method] = float(accepted.double().mean())
    assert lengths["block"] > lengths["token"] + 0.02


def test_without_a_draft_the_token_is_the_one_that_sampling_draws() -> None:
    logits = randn(5, 30) * 2
    settings = (torch.ones(5), torch.zeros(5).long(), torch.ones(5), torch.zeros(5))
    seed, position = torch.arange(5), torch.arange(5) + 9
    probs = filtered_probs_ref(logits, *settings)
    target = torch.stack([probs, probs], 1)
    accepted, token = verify_drafts_ref(
        target, None, torch.zeros(5, 1).long(), torch.zeros(5).long(), seed, position
    )
    assert accepted.tolist() == [0] * 5
    assert torch.equal(token, sample_ref(logits, *settings, seed, position))


def test_a_greedy_draft_that_is_rejected_is_not_drawn_again() -> None:
    target = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]).expand(200, 2, 3)
    draft = torch.zeros(200, 1, dtype=torch.int64)
    accepted, token = verify_drafts_ref(
        target, None, draft, torch.ones(200).long(), torch.arange(200), torch.zeros(200).long()
    )
    assert set(token[accepted == 0].tolist()) == {1}
    assert 60 < int(accepted.sum()) < 140


def test_greedy_drafts_are_accepted_up_to_the_first_that_differs() -> None:
    best = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    draft = torch.tensor([[1, 2], [1, 9], [9, 2], [1, 2]])
    accepted, token = accept_greedy_ref(best, draft, torch.tensor([2, 2, 2, 1]))
    assert accepted.tolist() == [2, 1, 0, 1]
    assert token.tolist() == [3, 2, 1, 2]
