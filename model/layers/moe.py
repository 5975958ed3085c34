"""Mixture of experts with one shared expert (spec/backbone 6)."""

import torch
from epdserve.kernels.moe import route
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.arithmetic import Arithmetic


class MoE:
    """The router; experts are the arithmetic's."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, math: Arithmetic) -> None:
        text, prefix = config.text, f"layers.{spec.index}.ffn."
        self.top_k, self.scaling = text.num_experts_per_tok, text.routed_scaling_factor
        self.gate = math.projection(prefix + "gate.weight", quantized=False, out_dtype=torch.float32)
        self.bias_E = math.tensor(prefix + "gate.bias").float()
        self.bias_vl_E = math.tensor(prefix + "gate.bias_vl").float()
        self.experts = math.experts(prefix)

    def __call__(self, x_TD: torch.Tensor, is_image_T: torch.Tensor) -> torch.Tensor:
        """(T, hidden) -> (T, hidden). Image rows are routed with ``bias_vl``."""
        bias_TE = torch.where(is_image_T[:, None], self.bias_vl_E, self.bias_E)
        experts_Tk, weights_Tk = route(self.gate(x_TD), bias_TE, self.top_k, self.scaling)
        return self.experts(x_TD, experts_Tk, weights_Tk)
