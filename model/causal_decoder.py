"""The causal decoder: attention of the layer at the cut and all layers above it, on the kept rows."""

from collections.abc import Sequence
from typing import Any

import torch
from epdserve.kernels.mhc import collapse
from epdserve.model.layers.block import Block, Residual
from epdserve.model.layers.context import ForwardContext


class CausalDecoder:
    """The attending half of the cut layer and layers (cut, last]."""

    def __init__(self, cut_block: Block, blocks: Sequence[Block]) -> None:
        self.cut_block, self.blocks = cut_block, tuple(blocks)

    def forward(self, residual: Residual, cut_keys: Any, context: ForwardContext) -> torch.Tensor:
        """(R, hidden) float32: exit vectors of the batch's output rows, before the final norm."""
        batch, rows = context.batch, context.batch.kept_rows
        if not len(rows):
            return residual.carried_Tn.new_empty(0, residual.streams_TnD.shape[-1])
        if rows is not batch.all_rows:
            residual = residual.rows(rows.rows_T)
        residual = self.cut_block.finish(residual, cut_keys, rows, batch.cut_window, context)
        for block in self.blocks:
            context.require_wanted()
            residual = block.forward(residual, rows, batch.decoder_window, context)
        out = residual.rows(batch.output_rows_R).settled()
        return collapse(out.streams_TnD, out.carried_Tn).float()
