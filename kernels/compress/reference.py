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
