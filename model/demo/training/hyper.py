"""Hyper-connections over streams laid out as (n, N, D): a copy is one matrix, so mixing needs no small products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from epdserve.model.config import TextConfig
from epdserve.model.demo.training.ops import rms_norm, sinkhorn
from torch import Tensor


class Streams:
    """Residual streams and the collapse coefficients carried to the next sub-block (spec/backbone 2.2-2.4)."""

    def __init__(self, copies_nND: Tensor, carried_nN: Tensor) -> None:
        self.copies_nND, self.carried_nN = copies_nND, carried_nN

    @staticmethod
    def enter(embedding_ND: Tensor, copies: int) -> Streams:
        """Equal copies; the first sub-block reads copy 0."""
        carried = embedding_ND.new_zeros(copies, len(embedding_ND))
        carried[0] = 1.0
        return Streams(embedding_ND.expand(copies, -1, -1), carried)

    def collapse(self) -> Tensor:
        """(N, D): the weighted sum of the copies."""
        return (self.copies_nND * self.carried_nN[..., None]).sum(0)


class Hyper:
    """One hyper-connection, attention's or the feed-forward's."""

    def __init__(self, text: TextConfig, layer: int, name: str, weights: Mapping[str, Tensor]) -> None:
        prefix = f"layers.{layer}."
        self.fn, self.scale = weights[f"{prefix}hc_{name}_fn"], weights[f"{prefix}hc_{name}_scale"]
        self.base, self.norm = weights[f"{prefix}hc_{name}_base"], weights[f"{prefix}{name}_norm.weight"]
        self.copies, self.text, self.iters = text.hc_mult, text, text.hc_sinkhorn_iters

    def read(self, streams: Streams) -> Tensor:
        """(N, D): normed input of the sub-block."""
        return rms_norm(streams.collapse(), self.norm, self.text.rms_norm_eps)

    def coefficients(self, copies_nND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(carried on (n, N), post (n, N), comb (n, n, N))."""
        n, text = self.copies, self.text
        rate = copies_nND.square().mean((0, 2)).add(text.rms_norm_eps).rsqrt()
        by_copy = self.fn.unflatten(1, (n, -1)).transpose(0, 1)  # (n, mixes, D)
        mixes = torch.bmm(by_copy, copies_nND.transpose(1, 2)).sum(0) * rate
        scale = self.scale.repeat_interleave(torch.tensor([n, n, n * n]))
        logits = mixes * scale[:, None] + self.base[:, None]
        comb = sinkhorn(logits[2 * n :].unflatten(0, (n, n)), self.iters, text.hc_eps)
        return logits[:n].sigmoid() + text.hc_eps, 2 * logits[n : 2 * n].sigmoid(), comb

    def write(self, copies_nND: Tensor, out_ND: Tensor, post_nN: Tensor, comb_nnN: Tensor) -> Tensor:
        """New streams: ``post[j] * out + sum_i comb[i, j] * copies[i]``."""
        mixed = []
        for j in range(self.copies):
            total = post_nN[j, :, None] * out_ND
            for i in range(self.copies):
                total = torch.addcmul(total, comb_nnN[i, j, :, None], copies_nND[i])
            mixed.append(total)
        return torch.stack(mixed)
