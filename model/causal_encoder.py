"""The causal encoder: layers below the cut over every row, and the KV of the layer at the cut.

After it, all global KV of these rows is written (spec/backbone 8.2). A prefill worker that holds only this half can
serve if the decoder rows are run elsewhere.
"""

from collections.abc import Sequence
from typing import Any

import torch
from epdserve.model.batch import ForwardBatch
from epdserve.model.layers.block import Block, Residual
from epdserve.model.layers.context import ForwardContext


class CausalEncoder:
    """Layers [0, cut) and the KV-writing half of the cut layer."""

    def __init__(
        self, embed_VD: torch.Tensor, copies: int, blocks: Sequence[Block], cut_block: Block
    ) -> None:
        self._embed_VD, self._copies = embed_VD, copies
        self.blocks, self.cut_block = tuple(blocks), cut_block

    def forward(self, context: ForwardContext) -> tuple[Residual, Any]:
        """Run all rows.

        Returns:
            The settled residual entering the cut layer, and the window keys of the cut layer.
        """
        batch = context.batch
        residual = self._enter(batch)
        for block in self.blocks:
            context.require_wanted()
            residual = block.forward(residual, batch.all_rows, batch.encoder_window, context)
        residual = self.cut_block.inject(residual.settled(), batch.all_rows, context)
        return residual, self.cut_block.write_kv(residual, batch.all_rows, batch.encoder_window, context)

    def _enter(self, batch: ForwardBatch) -> Residual:
        """Equal copies of the embedding; the first sub-block reads copy 0 (spec/backbone 2.2).

        Rows of an image have the vision encoder's embedding (spec/modules 3.4).
        """
        h_TD = self._embed_VD[batch.token_ids_T]
        if batch.embedded is not None:
            h_TD[batch.embedded.rows_N] = batch.embedded.values_ND.to(h_TD.dtype)
        carried_Tn = torch.zeros(len(h_TD), self._copies, device=h_TD.device)
        carried_Tn[:, 0] = 1.0
        return Residual(h_TD[:, None].repeat(1, self._copies, 1), carried_Tn)
