"""One transformer layer: Engram where it has one, attention and MoE, each inside a hyper-connection."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from epdserve.model.batch import QueryRows, WindowPlan
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.attention import Attention
from epdserve.model.layers.context import ForwardContext
from epdserve.model.layers.engram import Engram
from epdserve.model.layers.hyper import HyperConnection
from epdserve.model.layers.moe import MoE
from epdserve.model.precision import Precision


@dataclass(frozen=True, slots=True)
class Residual:
    """Residual streams (T, n, hidden) and the collapse coefficients (T, n) carried to the next sub-block."""

    streams_TnD: torch.Tensor
    carried_Tn: torch.Tensor

    def rows(self, rows_T: torch.Tensor) -> "Residual":
        """The same for a subset of the rows."""
        return Residual(self.streams_TnD[rows_T], self.carried_Tn[rows_T])


class Block:
    """One layer. ``forward`` is ``write_kv`` and ``finish`` on the same rows; the cut layer calls them apart."""

    def __init__(
        self,
        config: ModelConfig,
        spec: LayerSpec,
        weights: Mapping[str, torch.Tensor],
        token_map_V: torch.Tensor,
        precision: Precision,
    ) -> None:
        self.spec = spec
        self.engram = Engram(config, spec.index, weights, token_map_V, precision) if spec.engram else None
        self.attn_hyper = HyperConnection(config, spec.index, "attn", weights)
        self.attention = Attention(config, spec, weights, precision)
        self.ffn_hyper = HyperConnection(config, spec.index, "ffn", weights)
        self.moe = MoE(config, spec, weights, precision)

    def forward(
        self, residual: Residual, rows: QueryRows, plan: WindowPlan, context: ForwardContext
    ) -> Residual:
        """Run the layer on ``rows``; ``plan`` has queries and keys over these rows."""
        residual = self.inject(residual, rows, context)
        x_TD = self.attn_hyper.collapse(residual.streams_TnD, residual.carried_Tn)
        keys_KD = self.attention.write_kv(x_TD, rows, plan, context)
        return self._finish(residual, x_TD, keys_KD, rows, plan, context)

    def inject(self, residual: Residual, rows: QueryRows, context: ForwardContext) -> Residual:
        """Engram, before anything else of the layer sees the streams."""
        if self.engram is None:
            return residual
        return Residual(self.engram(residual.streams_TnD, rows, context.batch), residual.carried_Tn)

    def write_kv(
        self, residual: Residual, rows: QueryRows, plan: WindowPlan, context: ForwardContext
    ) -> torch.Tensor:
        """Only what later rows need of this layer: window rows and entries. Returns the window keys."""
        x_TD = self.attn_hyper.collapse(residual.streams_TnD, residual.carried_Tn)
        return self.attention.write_kv(x_TD, rows, plan, context)

    def finish(
        self,
        residual: Residual,
        keys_KD: torch.Tensor,
        rows: QueryRows,
        plan: WindowPlan,
        context: ForwardContext,
    ) -> Residual:
        """The rest of the layer after ``write_kv``, on a subset of its rows."""
        x_TD = self.attn_hyper.collapse(residual.streams_TnD, residual.carried_Tn)
        return self._finish(residual, x_TD, keys_KD, rows, plan, context)

    def _finish(
        self,
        residual: Residual,
        x_TD: torch.Tensor,
        keys_KD: torch.Tensor,
        rows: QueryRows,
        plan: WindowPlan,
        context: ForwardContext,
    ) -> Residual:
        streams = residual.streams_TnD
        carried, post, comb = self.attn_hyper.coefficients(streams)
        streams = self.attn_hyper.expand(
            streams, self.attention.attend(x_TD, keys_KD, rows, plan, context), post, comb
        )
        x_TD = self.ffn_hyper.collapse(streams, carried)
        carried, post, comb = self.ffn_hyper.coefficients(streams)
        return Residual(self.ffn_hyper.expand(streams, self.moe(x_TD, rows.is_image_T), post, comb), carried)
