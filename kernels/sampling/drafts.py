"""Verification of drafted tokens in plain PyTorch (spec/modules.md 2.5). R = requests, K = drafts, V = vocabulary.

The target has run on [anchor, draft 1 .. draft K], so it has K + 1 distributions; the drafter has K, those the drafts
were drawn from. Nothing a request gets depends on the rows beside it, or on ``count`` of another row.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from epdserve.kernels.sampling.reference import filtered_mass_ref, uniform_ref
from torch import Tensor

Method = Literal["token", "block"]
ACCEPT_SALT: Final = 0x5DEECE66D  # of the numbers that accept drafts, apart from those that draw tokens
_LEAST_MASS: Final = 1e-8  # a residual below this is rounding: draw from the target instead


def filtered_probs_ref(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Distribution that ``sample`` draws from: (R, V) float32; a row of temperature 0 is one-hot at its best token."""
    mass_RV = filtered_mass_ref(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return (mass_RV.double() / mass_RV.double().sum(1, keepdim=True)).float()


def accept_greedy_ref(best_RK1: Tensor, draft_RK: Tensor, count_R: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts that equal the target's best tokens, and the best token behind them.

    Args:
        best_RK1: (R, K + 1) int64 best token of each of the target's rows.
        draft_RK: (R, K) int64.
        count_R: (R,) int64, drafts of each row that count, 0 .. K.

    Returns:
        (R,) int64 how many drafts are accepted, and (R,) int64 the token after them.
    """
    drafts = draft_RK.shape[1]
    right = (best_RK1[:, :drafts] == draft_RK) & (
        torch.arange(drafts, device=draft_RK.device) < count_R[:, None]
    )
    accepted_R = right.long().cumprod(1).sum(1)
    return accepted_R, best_RK1.gather(1, accepted_R.unsqueeze(1)).squeeze(1)


def verify_drafts_ref(
    target_RKV: Tensor,
    drafter_RKV: Tensor | None,
    draft_RK: Tensor,
    count_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    method: Method = "token",
) -> tuple[Tensor, Tensor]:
    """Accept drafts so that the tokens are distributed as the target's own, and draw the token after them.

    ``token``: draft i is accepted if u < p(draft) / q(draft); the first one that is not is replaced by a draw from
    max(p - q, 0). ``block``: the longest run whose joint ratio allows it, never fewer tokens in expectation. All
    accepted: the next token is drawn from the target.

    Args:
        target_RKV: (R, K + 1, V) float32 distributions of the target, after all filters and masks.
        drafter_RKV: (R, K, V) float32 distributions the drafts were drawn from; None if each was the drafter's best.
        draft_RK: (R, K) int64.
        count_R: (R,) int64, drafts of each row that count, 0 .. K; chosen without looking at what they are.
        seed_R, position_R: (R,) int64, of the draw; ``position`` is the first draft's.
        method: How runs are accepted.

    Returns:
        (R,) int64 how many drafts are accepted, and (R,) int64 the token after them.

    Numerics: products and sums in float64. A row's result depends on that row only.
    """
    step = torch.arange(draft_RK.shape[1] + 1, device=draft_RK.device)
    place = position_R.unsqueeze(1) + step
    draws = uniform_ref(seed_R.unsqueeze(1), place).tolist()
    chances = uniform_ref(seed_R.unsqueeze(1) ^ ACCEPT_SALT, place).tolist()
    results = torch.zeros(draft_RK.shape[0], 2, dtype=torch.int64, device=draft_RK.device)
    for row, count in enumerate(count_R.tolist()):
        drafter = None if drafter_RKV is None else drafter_RKV[row].double()
        verdict = _verify_row(
            target_RKV[row].double(), drafter, draft_RK[row, :count], chances[row], draws[row], method
        )
        results[row] = torch.tensor(verdict)
    return results[:, 0].contiguous(), results[:, 1].contiguous()


def _verify_row(
    target: Tensor,
    drafter: Tensor | None,
    draft: Tensor,
    chances: list[float],
    draws: list[float],
    method: Method,
) -> tuple[int, int]:
    count = len(draft)
    q = (
        torch.stack([_drafter_row(drafter, draft, i, target.shape[1]) for i in range(count)])
        if count
        else target
    )
    accept = _accept_tokens if method == "token" else _accept_block
    accepted, weight = accept(target, q, draft, chances)
    mass = target[accepted]
    if accepted < count:
        residual = (weight * mass - q[accepted]).clamp(min=0)
        mass = residual if float(residual.sum()) > _LEAST_MASS else mass
    running = mass.cumsum(0)
    place = torch.searchsorted(running, draws[accepted] * running[-1:], right=True)
    return accepted, int(place.minimum(torch.searchsorted(running, running[-1:])))


def _drafter_row(drafter: Tensor | None, draft: Tensor, i: int, vocabulary: int) -> Tensor:
    if drafter is not None:
        return drafter[i]
    return torch.zeros(vocabulary, dtype=torch.float64, device=draft.device).index_fill(
        0, draft[i : i + 1], 1.0
    )


def _accept_tokens(target: Tensor, q: Tensor, draft: Tensor, uniform: list[float]) -> tuple[int, float]:
    for i, token in enumerate(draft.tolist()):
        if not uniform[i] * float(q[i, token]) < float(target[i, token]):
            return i, 1.0
    return len(draft), 1.0


def _accept_block(target: Tensor, q: Tensor, draft: Tensor, uniform: list[float]) -> tuple[int, float]:
    """Sun et al., block verification: w is the joint ratio of the run so far, h the probability to stop behind it."""
    accepted, weight_there, weight = 0, 1.0, 1.0
    for i, token in enumerate(draft.tolist()):
        p_token, q_token = float(target[i, token]), float(q[i, token])
        weight = min(1.0, weight * p_token / q_token) if q_token > 0 else 0.0
        stop = weight
        if i + 1 < len(draft):
            left = float((weight * target[i + 1] - q[i + 1]).clamp(min=0).sum())
            stop = left / (left + 1 - weight) if left > 0 else 0.0
        if uniform[i] < stop:
            accepted, weight_there = i + 1, weight
    return accepted, weight_there
