"""Single-Pass hyper-connection around one sub-block (spec/backbone 2.3-2.4)."""

from dataclasses import dataclass

import torch
from epdserve.kernels.mhc import advance, collapse, hyper_coefficients
from epdserve.kernels.norm import rms_norm
from epdserve.model.config import ModelConfig
from epdserve.model.layers.arithmetic import Arithmetic
from epdserve.model.layers.residual import Residual, Update


@dataclass(frozen=True, slots=True)
class Entered:
    """Streams before a sub-block, and the coefficients predicted from them."""

    streams_TnD: torch.Tensor
    carried_Tn: torch.Tensor
    post_Tn: torch.Tensor
    comb_Tnn: torch.Tensor

    def leave(self, out_TD: torch.Tensor) -> Residual:
        """After the sub-block gave ``out_TD``."""
        return Residual(self.streams_TnD, self.carried_Tn, Update(out_TD, self.post_Tn, self.comb_Tnn))


class HyperConnection:
    """Collapses the residual streams into a sub-block's input and spreads its output over them.

    The sub-block collapses with the coefficients carried from the one before it; the ones predicted here are carried
    on. ``name`` is ``attn`` or ``ffn``.
    """

    def __init__(self, config: ModelConfig, layer: int, name: str, math: Arithmetic) -> None:
        prefix, text = f"layers.{layer}.", config.text
        self.fn = math.tensor(f"{prefix}hc_{name}_fn").float()
        self.scale = math.tensor(f"{prefix}hc_{name}_scale").float()
        self.base = math.tensor(f"{prefix}hc_{name}_base").float()
        self.norm = math.tensor(f"{prefix}{name}_norm.weight")
        self.iters, self.hc_eps, self.eps = text.hc_sinkhorn_iters, text.hc_eps, text.rms_norm_eps

    def look(self, residual: Residual) -> torch.Tensor:
        """(T, hidden): the normed input of the sub-block. The residual is settled."""
        return rms_norm(collapse(residual.streams_TnD, residual.carried_Tn), self.norm, self.eps)

    def enter(self, residual: Residual) -> tuple[torch.Tensor, Entered]:
        """The normed input of the sub-block (T, hidden), and what spreads its output."""
        streams, carried, update = residual.streams_TnD, residual.carried_Tn, residual.update
        predictor = (self.fn, self.scale, self.base, self.iters, self.hc_eps, self.eps)
        if update is None:
            coefficients = hyper_coefficients(streams, *predictor)
            collapsed = collapse(streams, carried)
        else:
            streams, collapsed, coefficients = advance(
                streams, update.out_TD, update.post_Tn, update.comb_Tnn, carried, *predictor
            )
        return rms_norm(collapsed, self.norm, self.eps), Entered(streams, *coefficients)
