"""Mixture of experts with one shared expert (spec/backbone 6)."""

from collections.abc import Mapping

import torch
from epdserve.kernels.linear import linear
from epdserve.kernels.moe import route, swiglu
from epdserve.kernels.quant import round_fp8
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.linear import Linear
from epdserve.model.precision import Precision


class MoE:
    """Routed and shared experts. Rows are sorted by expert, so that each expert is one product over its rows."""

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
        flat = experts_Tk.flatten()
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=len(self.w13_ENK)).tolist()
        x = (round_fp8(x_TD) if self.rounds else x_TD).float()[order // self.top_k]
        weight = weights_Tk.flatten()[order, None]
        out = torch.empty(len(flat), x_TD.shape[1], device=x.device)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                end = begin + count
                out[order[begin:end]] = self._expert(expert, x[begin:end], weight[begin:end])
                begin = end
        return out.view(*experts_Tk.shape, -1).sum(dim=1)

    def _expert(self, expert: int, x_RD: torch.Tensor, weight_R1: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x_RD, self.w13_ENK[expert]).to(self.dtype).float().chunk(2, dim=-1)
        # The routing weight comes before w2, so that it takes part in the second rounding (spec/backbone 6).
        hidden = (swiglu(gate, up, self.limit) * weight_R1).to(self.dtype)
        hidden = round_fp8(hidden) if self.rounds else hidden
        return linear(hidden.float(), self.w2_EKN[expert]).to(self.dtype).float()
