"""Optimisers: Muon for the matrices inside the layers, Adam for everything else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

# Look-up tables, the router and the hyper-connections are no maps between vectors of one kind.
_NOT_MUON: Final = re.compile(r"^(embed|head)|engram|\.hc_|gate")
_STEPS: Final = 5
_QUINTIC: Final = (
    3.4445,
    -4.7750,
    2.0315,
)  # Newton-Schulz polynomial that drives singular values to about one


def takes_muon(name: str, value: Tensor) -> bool:
    """Whether the tensor of this name is updated by Muon."""
    return value.ndim >= 2 and _NOT_MUON.search(name) is None


class Muon:
    """Momentum, orthogonalised. Matrices of equal shape are taken together; leading dimensions are more matrices."""

    def __init__(self, tensors: Iterable[Tensor], *, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self.moving = [(tensor, torch.zeros_like(tensor)) for tensor in tensors]

    @torch.no_grad()
    def step(self, share: float) -> None:
        """One update with ``share`` of the full rate."""
        groups: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        for tensor, average in self.moving:
            if tensor.grad is None:
                continue
            average.lerp_(tensor.grad, 1 - self.momentum)
            ahead = tensor.grad.lerp(average, self.momentum)
            groups.setdefault((tensor.shape[-2], tensor.shape[-1]), []).append((tensor, ahead))
        for (rows, columns), members in groups.items():
            stack = torch.cat([ahead.reshape(-1, rows, columns) for _, ahead in members])
            update = orthogonal(stack).mul_(-self.rate * share * max(1.0, rows / columns) ** 0.5)
            start = 0
            for tensor, _ in members:
                count = tensor.numel() // (rows * columns)
                tensor.add_(update[start : start + count].view(tensor.shape))
                start += count


def orthogonal(stack_GNK: Tensor) -> Tensor:
    """Each matrix with its singular values moved near one."""
    tall = stack_GNK.shape[1] > stack_GNK.shape[2]
    x = stack_GNK.transpose(1, 2) if tall else stack_GNK
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        square = x @ x.transpose(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    result: Tensor = x.transpose(1, 2) if tall else x
    return result.contiguous()


def split_parameters(weights: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """(for Muon, for Adam) of the tensors that are trained."""
    trained = {name: value for name, value in weights.items() if value.requires_grad}
    return (
        [value for name, value in trained.items() if takes_muon(name, value)],
        [value for name, value in trained.items() if not takes_muon(name, value)],
    )
