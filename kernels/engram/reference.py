"""Engram in plain PyTorch: n-gram table rows and the gate (spec/backbone.md 2.5, spec/modules.md 1.5-1.7)."""

from __future__ import annotations

import torch
from torch import Tensor


def ngram_rows_ref(
    compressed_TS: Tensor, pad_id: int, multipliers_S: Tensor, primes_GH: Tensor, offsets: Tensor
) -> Tensor:
    """Table rows of each token's n-grams.

    Args:
        compressed_TS: (T, S) int64 compressed ids, own token first, then looking back; negative = blocked (before the
            start, or inside an image span). A block hides everything behind it.
        pad_id: Compressed id that stands for blocked tokens.
        multipliers_S: (S,) int64, odd.
        primes_GH: (G, heads) int64 with G = S - 1 orders: 2-grams first.
        offsets: (G * heads,) int64, first row of each column's own part of the table.

    Returns:
        (T, G * heads) int64.
    """
    orders = primes_GH.shape[0]
    blocked = (compressed_TS < 0).cummax(1).values
    terms = compressed_TS.masked_fill(blocked, pad_id) * multipliers_S
    rolled = terms[:, 0]
    grams = []
    for order in range(1, orders + 1):
        rolled = rolled ^ terms[:, order]
        grams.append(rolled)
    hashed = torch.stack(grams, dim=1).unsqueeze(-1) % primes_GH
    return hashed.flatten(1).add_(offsets)


def engram_gate_ref(
    streams_TnD: Tensor,
    keys_TnD: Tensor,
    value_TD: Tensor,
    q_weight_nD: Tensor,
    k_weight_nD: Tensor,
    eps: float,
    blocked_T: Tensor | None = None,
) -> Tensor:
    """Streams (T, n, D) after the injection of the memory value; dtype of the streams.

    Each copy's gate compares the normalised stream with the normalised key. Rows in ``blocked_T`` (bool; image
    spans) come back unchanged.
    """
    streams, keys = streams_TnD.float(), keys_TnD.float()
    width = streams.shape[-1]
    dot = (streams * keys).mul_(q_weight_nD.float() * k_weight_nD.float()).sum(-1)
    norms = _mean_square(streams).add_(eps).rsqrt_().mul_(_mean_square(keys).add_(eps).rsqrt_())
    dot = dot.mul_(norms).mul_(width**-0.5)
    root = dot.abs().clamp_(min=1e-6).sqrt_().copysign_(dot)
    gate = root.neg_().exp_().add_(1.0).reciprocal_().unsqueeze(-1)
    injected = (gate * value_TD.float().unsqueeze(1)).add_(streams).to(streams_TnD.dtype)
    if blocked_T is None:
        return injected
    return torch.where(blocked_T.view(-1, 1, 1), streams_TnD, injected)


def _mean_square(x: Tensor) -> Tensor:
    return (x * x).sum(-1).div_(x.shape[-1])
