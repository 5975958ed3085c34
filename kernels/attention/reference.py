"""Attention over gathered entries in plain PyTorch (spec/backbone.md 3). Keys and values are the same vectors."""

from __future__ import annotations

import torch
from torch import Tensor


def sink_attention_ref(
    q_THD: Tensor, kv_TND: Tensor, valid_TN: Tensor, sink_H: Tensor, scale: float
) -> Tensor:
    """One softmax over each token's own entries, with a sink in the denominator.

    Args:
        q_THD: (T, H, D) queries.
        kv_TND: (T, N, D) entries of each token, shared by all heads. Must be finite where not valid.
        valid_TN: (T, N) bool, which entries count.
        sink_H: (H,) logit of the sink, not multiplied by ``scale``; it contributes no value.
        scale: Factor of the scores.

    Returns:
        (T, H, D) float32. A token without a valid entry gives zeros.

    Numerics: a row's bits depend on that row, N and D only.
    """
    score = torch.bmm(q_THD.float() * scale, kv_TND.float().transpose(1, 2))
    score.masked_fill_(~valid_TN.unsqueeze(1), float("-inf"))
    sink = sink_H.float().view(1, -1, 1).expand(score.shape[0], -1, -1)
    weight = torch.cat((score, sink), dim=2).softmax(-1)
    return torch.bmm(weight[..., :-1], kv_TND.float())
