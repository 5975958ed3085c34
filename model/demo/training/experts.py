"""Routed and shared experts over the rows of a batch, with the load that balances the router."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from epdserve.kernels.moe import route
from epdserve.model.config import TextConfig
from epdserve.model.demo.training.ops import swiglu
from torch import Tensor
from torch.nn import functional


class Experts:
    """The feed-forward of one layer."""

    def __init__(self, text: TextConfig, layer: int, weights: Mapping[str, Tensor]) -> None:
        prefix = f"layers.{layer}.ffn."
        self.gate, self.bias = weights[prefix + "gate.weight"], weights[prefix + "gate.bias"]
        self.w1, self.w2, self.w3 = (weights[f"{prefix}experts.{name}"] for name in ("w1", "w2", "w3"))
        shared = prefix + "shared_experts."
        self.s1, self.s2, self.s3 = (weights[f"{shared}{name}.weight"] for name in ("w1", "w2", "w3"))
        self.text = text
        self.load_E: Tensor | None = None  # share of the choices that each expert got in the last forward

    def forward(self, x_ND: Tensor) -> Tensor:
        """(N, D) -> (N, D)."""
        limit = self.text.swiglu_limit
        shared = swiglu(functional.linear(x_ND, self.s1), functional.linear(x_ND, self.s3), limit)
        return functional.linear(shared, self.s2) + self._routed(x_ND)

    def _routed(self, x_ND: Tensor) -> Tensor:
        count, top_k = self.text.n_routed_experts, self.text.num_experts_per_tok
        logits_NE = functional.linear(x_ND, self.gate)
        affinity = functional.softplus(logits_NE).sqrt()
        with torch.no_grad():
            choice_Nk = route(logits_NE, self.bias, top_k, 1.0)[0]
        weight_Nk = affinity.gather(1, choice_Nk)
        weight_Nk = weight_Nk / (weight_Nk.sum(1, keepdim=True) + 1e-20) * self.text.routed_scaling_factor
        chosen = choice_Nk.flatten()
        order = chosen.argsort()
        counts = torch.bincount(chosen, minlength=count)
        self.load_E = counts / len(chosen)
        rows = order // top_k
        groups = x_ND.index_select(0, rows).split(counts.tolist())
        ups, downs = torch.cat([self.w1, self.w3], dim=1).unbind(0), self.w2.unbind(0)
        outs = [self._expert(*parts) for parts in zip(groups, ups, downs, strict=True) if len(parts[0])]
        weighted = torch.cat(outs) * weight_Nk.flatten()[order][:, None]
        return torch.zeros_like(x_ND).index_add(0, rows, weighted)

    def _expert(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, value = functional.linear(x, up).chunk(2, dim=-1)
        return functional.linear(swiglu(gate, value, self.text.swiglu_limit), down)
