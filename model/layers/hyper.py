"""Single-Pass hyper-connection around one sub-block (spec/backbone 2.3-2.4)."""

from collections.abc import Mapping

import torch
from epdserve.kernels.mhc import collapse, expand, hyper_coefficients
from epdserve.kernels.norm import rms_norm
from epdserve.model.config import ModelConfig


class HyperConnection:
    """Collapses the residual streams into a sub-block's input and spreads its output over them.

    The sub-block collapses with the coefficients carried from the one before it; the ones predicted here are carried
    on. ``name`` is ``attn`` or ``ffn``.
    """

    def __init__(
        self, config: ModelConfig, layer: int, name: str, weights: Mapping[str, torch.Tensor]
    ) -> None:
        prefix = f"layers.{layer}."
        self.fn = weights[f"{prefix}hc_{name}_fn"].float()
        self.scale = weights[f"{prefix}hc_{name}_scale"].float()
        self.base = weights[f"{prefix}hc_{name}_base"].float()
        self.norm = weights[f"{prefix}{name}_norm.weight"]
        self.iters, self.hc_eps, self.eps = (
            config.text.hc_sinkhorn_iters,
            config.text.hc_eps,
            config.text.rms_norm_eps,
        )

    def collapse(self, streams_TnD: torch.Tensor, carried_Tn: torch.Tensor) -> torch.Tensor:
        """(T, n, hidden), (T, n) -> (T, hidden): the normed input of the sub-block."""
        return rms_norm(collapse(streams_TnD, carried_Tn), self.norm, self.eps)

    def coefficients(self, streams_TnD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(carried on, post, comb) predicted from the un-collapsed streams, float32."""
        return hyper_coefficients(
            streams_TnD, self.fn, self.scale, self.base, self.iters, self.hc_eps, self.eps
        )

    def expand(
        self, streams_TnD: torch.Tensor, y_TD: torch.Tensor, post_Tn: torch.Tensor, comb_Tnn: torch.Tensor
    ) -> torch.Tensor:
        """The streams after the sub-block, in their type."""
        return expand(streams_TnD, y_TD, post_Tn, comb_Tnn)
