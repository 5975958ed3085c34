"""Mixture of experts with one shared expert (spec/backbone 6)."""

from collections.abc import Mapping

import torch
from epdserve.kernels.linear import grouped_linear, linear
from epdserve.kernels.moe import route, swiglu
from epdserve.kernels.quant import round_fp8
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.linear import Linear
from epdserve.model.precision import Precision


class MoE:
    """Routed and shared experts."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, torch.Tensor], precision: Precision
    ) -> None:
        text, prefix = config.text, f"layers.{spec.index}.ffn."
        self.top_k, self.scaling, self.limit = (
            text.num_experts_per_tok,
            text.routed_scaling_factor,
            text.swiglu_limit,
        )
        self.dtype, self.rounds = precision.activation_dtype, precision.quantizes_activations
        self.gate_EK = weights[prefix + "gate.weight"].float()
        self.bias_E, self.bias_vl_E = weights[prefix + "gate.bias"], weights[prefix + "gate.bias_vl"]
        self.experts_E = torch.arange(len(self.gate_EK), device=self.gate_EK.device)
        # Gate and up are one product: (E, 2 * inter, hidden).
        self.w13_ENK = torch.cat([weights[prefix + "experts.w1"], weights[prefix + "experts.w3"]], dim=1)
        self.w2_EKN = weights[prefix + "experts.w2"]
        shared = prefix + "shared_experts."
        shared_w13 = torch.cat([weights[shared + "w1.weight"], weights[shared + "w3.weight"]])
        self.shared_w13 = Linear(shared_w13, precision, quantized=True)
        self.shared_w2 = Linear(weights[shared + "w2.weight"], precision, quantized=True)

    def __call__(self, x_TD: torch.Tensor, is_image_T: torch.Tensor) -> torch.Tensor:
        """(T, hidden) -> (T, hidden). Image rows are routed with ``bias_vl``."""
        logits_TE = linear(x_TD.float(), self.gate_EK)
        bias_TE = torch.where(is_image_T[:, None], self.bias_vl_E, self.bias_E)
        experts_Tk, weights_Tk = route(logits_TE, bias_TE, self.top_k, self.scaling)
        routed_TD = self._routed(x_TD, experts_Tk, weights_Tk)
        gate, up = self.shared_w13(x_TD).chunk(2, dim=-1)
        shared_TD = self.shared_w2(swiglu(gate.float(), up.float(), self.limit).to(self.dtype))
        return (routed_TD + shared_TD.float()).to(self.dtype)

    def _routed(self, x_TD: torch.Tensor, experts_Tk: torch.Tensor, weights_Tk: torch.Tensor) -> torch.Tensor:
        """Rows lie as (place within the expert, expert), so that all experts are one grouped product."""
        num_experts, top_k = len(self.w13_ENK), self.top_k
        expert_P = experts_Tk.flatten()
        seen_PE = (expert_P[:, None] == self.experts_E).cumsum(0)
        where_P = (seen_PE.gather(1, expert_P[:, None]).flatten() - 1) * num_experts + expert_P
        capacity = int(seen_PE[-1].max())
        x = (round_fp8(x_TD) if self.rounds else x_TD).float()
        x_CED = x.new_zeros(capacity * num_experts, x.shape[1])
        x_CED = x_CED.index_copy_(0, where_P, x.repeat_interleave(top_k, dim=0)).view(
            capacity, num_experts, -1
        )
        weight_CE1 = x.new_zeros(capacity * num_experts).index_copy_(0, where_P, weights_Tk.flatten())
        weight_CE1 = weight_CE1.view(capacity, num_experts, 1)
        gate, up = grouped_linear(x_CED, self.w13_ENK).to(self.dtype).float().chunk(2, dim=-1)
        # The routing weight comes before w2, so that it takes part in the second rounding (spec/backbone 6).
        hidden = (swiglu(gate, up, self.limit) * weight_CE1).to(self.dtype)
        hidden = round_fp8(hidden) if self.rounds else hidden
        out_CED = grouped_linear(hidden.float(), self.w2_EKN).to(self.dtype).float()
        routed_TD: torch.Tensor = (
            out_CED.flatten(0, 1).index_select(0, where_P).view(-1, top_k, x.shape[1]).sum(1)
        )
        return routed_TD
