"""Token draws in plain PyTorch. R = rows, V = vocabulary.

A draw's random number is a hash of (seed, position), so the same request draws the same tokens whatever stands beside
it in the batch, after a preemption, and on another worker.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_FIRST_WIDTH: Final = 512  # tokens put in order before any filter was seen to need more
_GOLDEN: Final = _signed(0x9E3779B97F4A7C15)
_MIX_1: Final = _signed(0xBF58476D1CE4E5B9)
_MIX_2: Final = _signed(0x94D049BB133111EB)


def log_probs_ref(logits: Tensor) -> Tensor:
    """Natural logarithm of the softmax over the last dimension, float32."""
    return logits.float().log_softmax(-1)


def sample_ref(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """One token per row: (R,) int64.

    Temperature 0 takes the best token, the lowest index on ties. Otherwise the tokens are filtered: the ``top_k`` most
    probable (0 = all; ties: lower index first), of these the shortest run that holds ``top_p`` of their mass, and of
    these the ones with at least ``min_p`` times the best token's probability. The best token always stays. One uniform
    number of (seed, position) picks from what is left.

    Args:
        logits_RV: (R, V) float32.
        temperature_R, top_p_R, min_p_R: (R,) float.
        top_k_R, seed_R, position_R: (R,) int64.

    Numerics: running sums in float64; a row's result depends on that row only.
    """
    best, greedy = logits_RV.max(dim=1, keepdim=True)
    warm = temperature_R > 0
    if not bool(warm.any()):
        return greedy.squeeze(1)
    heat = temperature_R.float().where(warm, 1.0).unsqueeze(1)
    mass = ((logits_RV.float() - best) / heat).exp_()  # relative to the best token
    running = mass.cumsum(1, dtype=torch.float64)
    uniform = uniform_ref(seed_R, position_R).unsqueeze(1)
    token = _pick(running, uniform)
    rows = (warm & ((top_k_R > 0) | (top_p_R < 1) | (min_p_R > 0))).nonzero().squeeze(1)
    if rows.numel():
        token[rows] = _pick_filtered(
            mass[rows],
            running[rows, -1:],
            top_k_R[rows].unsqueeze(1),
            top_p_R[rows].double().unsqueeze(1),
            min_p_R[rows].double().unsqueeze(1),
            uniform[rows],
        )
    return torch.where(warm.unsqueeze(1), token, greedy).squeeze(1)


def _pick(running_RN: Tensor, uniform_R1: Tensor) -> Tensor:
    """(R, 1) first column whose running sum exceeds the uniform share of the total; never one of no mass."""
    total = running_RN[:, -1:].contiguous()
    place = torch.searchsorted(running_RN, uniform_R1 * total, right=True)
    # a product that rounds up to the total belongs to the last column that added to it
    return place.minimum(torch.searchsorted(running_RN, total))


def _pick_filtered(
    mass_RV: Tensor,
    total_R1: Tensor,
    top_k_R1: Tensor,
    top_p_R1: Tensor,
    min_p_R1: Tensor,
    uniform_R1: Tensor,
) -> Tensor:
    """(R, 1) token drawn from the filtered rows, in descending order of mass.

    Only the heaviest tokens are put in order, more of them if a row's filters let the last one through.
    """
    vocabulary = mass_RV.shape[1]
    width = min(
        vocabulary, max(_FIRST_WIDTH, int(top_k_R1.max()) + 1)
    )  # one beyond top_k shows that it ended
    limited = (top_k_R1 > 0) & (top_k_R1 < vocabulary)
    while True:
        mass, token = _heaviest(mass_RV, width)
        rank = torch.arange(width, device=mass.device)
        mass.masked_fill_(limited & (rank >= top_k_R1), 0.0)
        running = mass.cumsum(1, dtype=torch.float64)
        wanted = top_p_R1 * torch.where(limited, running[:, -1:], total_R1)
        drop = ((running - mass) >= wanted) | (mass < min_p_R1) | (mass == 0)
        drop[:, 0] = False
        if width == vocabulary or bool(drop[:, -1].all()):
            running = mass.masked_fill_(drop, 0.0).cumsum(1, dtype=torch.float64)
            return token.gather(1, _pick(running, uniform_R1))
        width = vocabulary


def filtered_mass_ref(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Mass of each token relative to the best one, (R, V) float32; 0 where the filters of ``sample`` drop it.

    A row of temperature 0 keeps its best token alone.
    """
    best, greedy = logits_RV.max(dim=1, keepdim=True)
    heat = temperature_R.float().where(temperature_R > 0, 1.0).unsqueeze(1)
    mass, token = _heaviest(((logits_RV.float() - best) / heat).exp_(), logits_RV.shape[1])
    rank = torch.arange(mass.shape[1], device=mass.device)
    top_k = torch.where(top_k_R > 0, top_k_R, mass.shape[1]).unsqueeze(1)
    mass = mass.masked_fill(rank >= top_k, 0.0)
    running = mass.cumsum(1, dtype=torch.float64)
    wanted = top_p_R.double().unsqueeze(1) * running[:, -1:]
    drop = ((running - mass) >= wanted) & (top_p_R < 1).unsqueeze(1) | (mass < min_p_R.double().unsqueeze(1))
    drop[:, 0] = False
    kept = torch.zeros_like(mass).scatter_(1, token, mass.masked_fill(drop, 0.0))
    one_hot = torch.zeros_like(mass).scatter_(1, greedy, 1.0)
    return torch.where((temperature_R > 0).unsqueeze(1), kept, one_hot)


def _heaviest(mass_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Mass and token, each (R, width), of the heaviest tokens in descending order; ties: lower index first.

    Masses are not negative, so their bits sort as integers; the inverted index below them makes the keys distinct.
    """
    last = mass_RV.shape[1] - 1
    inverted = torch.arange(last, -1, -1, device=mass_RV.device)
    key = ((mass_RV.view(torch.int32).long() << 32) | inverted).topk(width, dim=1).values
    return (key >> 32).int().view(torch.float32), last - (key & 0xFFFFFFFF)


def uniform_ref(seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Float64 in [0, 1) of (seed, position), 53 random bits: two rounds of a 64-bit mixing function."""
    bits = _mix(_mix(seed_R.long() + _GOLDEN) + position_R.long() * _GOLDEN)
    return _shift_right(bits, 11).double().mul_(2.0**-53)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift of int64 bits; torch's own keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
