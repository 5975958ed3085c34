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

    Temperature 0 takes the best token, the lowest index on ties. Otherwise the tokens are ordered by probability
    (ties: lower index first) and filtered: the ``top_k`` first (0 = all), then the shortest prefix of these that holds
    ``top_p`` of their mass, then those with at least ``min_p`` times the best token's probability. The first token
    always stays. One uniform number of (seed, position) picks from what is left.

    Args:
        logits_RV: (R, V) float32.
        temperature_R, top_p_R, min_p_R: (R,) float.
        top_k_R, seed_R, position_R: (R,) int64.

    Numerics: probabilities and running sums in float64; a row's result depends on that row only.
    """
    greedy = logits_RV.argmax(dim=1)
    cold = temperature_R <= 0
    if bool(cold.all()):
        return greedy
    heat = temperature_R.double().masked_fill(cold, 1.0).unsqueeze(1)
    value, token = logits_RV.sort(dim=1, descending=True, stable=True)
    mass = value.double().sub_(value[:, :1]).div_(heat).exp_()  # relative to the best token
    rank = torch.arange(mass.shape[1], device=mass.device)
    size = torch.where(top_k_R > 0, top_k_R, mass.shape[1]).unsqueeze(1)
    mass.masked_fill_(rank >= size, 0.0)
    before = mass.cumsum(1).sub_(mass)
    wanted = top_p_R.double().unsqueeze(1) * mass.sum(1, keepdim=True)
    drop = (before >= wanted) | (mass < min_p_R.double().unsqueeze(1))
    drop[:, 0] = False
    running = mass.masked_fill_(drop, 0.0).cumsum(1)
    target = uniform_ref(seed_R, position_R).unsqueeze(1) * running[:, -1:]
    place = torch.searchsorted(running, target, right=True).clamp_(max=mass.shape[1] - 1)
    return torch.where(cold, greedy, token.gather(1, place).squeeze(1))


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
