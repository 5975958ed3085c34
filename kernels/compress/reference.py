"""Token compression in plain PyTorch (spec/backbone.md 4)."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_pairs_ref(c0: Tensor, z0: Tensor, c1: Tensor, z1: Tensor) -> Tensor:
    """Two tokens as one entry: a softmax over the two gates ``z`` weights the values ``c``, channel by channel.

    All arguments (..., D) float32; result the same. Equal gates give the mean.
    """
    first = torch.exp(z1 - z0).add_(1.0).reciprocal_()  # exp may overflow to inf; the weight is 0 then
    second = torch.exp(z0 - z1).add_(1.0).reciprocal_()
    return first.mul_(c0).add_(second.mul_(c1))


def pool_entries_ref(
    content_TD: Tensor,
    gate_TD: Tensor,
    open_S2D: Tensor,
    opening_N: Tensor,
    slot_N: Tensor,
    closing_N: Tensor,
    keep_slot_M: Tensor,
    keep_row_M: Tensor,
) -> Tensor:
    """Entries that close in this step: (N, D) float32; then keeps the tokens that open one (spec/backbone.md 4).

    Args:
        content_TD, gate_TD: (T, D) float32 of this step's rows.
        open_S2D: (slots, 2, D) float32, changed: content and gate of the token that opened a group.
        opening_N, closing_N: (N,) rows of each entry's two tokens; ``opening`` means nothing where there is a slot.
        slot_N: (N,) slot whose kept token opened the entry, when the group spans two steps; negative for a row.
        keep_slot_M, keep_row_M: (M,) slots that keep a row of this step, none twice; a negative one keeps nothing.
    """
    kept = (slot_N >= 0).unsqueeze(1)
    stored_N2D = open_S2D[slot_N.clamp(min=0)] if open_S2D.shape[0] else open_S2D.new_zeros(len(slot_N), 2, 1)
    opening_N = opening_N.masked_fill(slot_N >= 0, 0)
    c0 = torch.where(kept, stored_N2D[:, 0], content_TD[opening_N])
    z0 = torch.where(kept, stored_N2D[:, 1], gate_TD[opening_N])
    entries = pool_pairs_ref(c0, z0, content_TD[closing_N], gate_TD[closing_N])
    if keep_slot_M.numel() and bool((keep_slot_M < 0).any()):
        keep_slot_M, keep_row_M = keep_slot_M[keep_slot_M >= 0], keep_row_M[keep_slot_M >= 0]
    open_S2D[keep_slot_M] = torch.stack((content_TD[keep_row_M], gate_TD[keep_row_M]), dim=1)
    return entries
