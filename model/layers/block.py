"""One transformer layer: Engram where it has one, attention and MoE, each inside a hyper-connection."""

from typing import Any

import torch
from epdserve.model.batch import QueryRows, WindowPlan
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.arithmetic import Arithmetic
from epdserve.model.layers.attention import Attention
from epdserve.model.layers.context import ForwardContext
from epdserve.model.layers.engram import Engram
from epdserve.model.layers.hyper import Entered, HyperConnection
from epdserve.model.layers.moe import MoE
from epdserve.model.layers.residual import Residual

__all__ = ["Block", "Residual"]


class Block:
    """One layer. ``forward`` is ``write_kv`` and ``finish`` on the same rows; the cut layer calls them apart."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, math: Arithmetic, token_map_V: torch.Tensor
    ) -> None:
        self.spec = spec
        self.engram = Engram(config, spec.index, math, token_map_V) if spec.engram else None
        self.attn_hyper = HyperConnection(config, spec.index, "attn", math)
        self.attention = Attention(config, spec, math)
        self.ffn_hyper = HyperConnection(config, spec.index, "ffn", math)
        self.moe = MoE(config, spec, math)

    def forward(
        self, residual: Residual, rows: QueryRows, plan: WindowPlan, context: ForwardContext
    ) -> Residual:
        """Run the layer on ``rows``; ``plan`` has queries and keys over these rows."""
        x_TD, entered = self.attn_hyper.enter(self.inject(residual, rows, context))
        keys = self.attention.write_kv(x_TD, rows, plan, context)
        return self._finish(x_TD, entered, keys, rows, plan, context)

    def inject(self, residual: Residual, rows: QueryRows, context: ForwardContext) -> Residual:
        """Engram, before anything else of the layer sees the streams."""
        if self.engram is None:
            return residual
        residual = residual.settled()
        return Residual(self.engram(residual.streams_TnD, rows, context.batch), residual.carried_Tn)

    def write_kv(self, residual: Residual, rows: QueryRows, plan: WindowPlan, context: ForwardContext) -> Any:
        """Only what later rows need of this layer: window rows and entries. Returns the window keys.

        The residual is settled: the rows that go on need its streams too.
        """
        return self.attention.write_kv(self.attn_hyper.look(residual), rows, plan, context)

    def finish(
        self,
        residual: Residual,
        keys: Any,
        rows: QueryRows,
        plan: WindowPlan,
        context: ForwardContext,
    ) -> Residual:
        """The rest of the layer after ``write_kv``, on a subset of its rows."""
        return self._finish(*self.attn_hyper.enter(residual), keys, rows, plan, context)

    def _finish(
        self,
        x_TD: torch.Tensor,
        entered: Entered,
        keys: Any,
        rows: QueryRows,
        plan: WindowPlan,
        context: ForwardContext,
    ) -> Residual:
        residual = entered.leave(self.attention.attend(x_TD, keys, rows, plan, context))
        x_TD, entered = self.ffn_hyper.enter(residual)
        return entered.leave(self.moe(x_TD, rows.is_image_T))
