"""Lightning indexer: the query side of choosing which compressed entries a row attends to (spec/backbone 5).

Scores are float32; ties go to the lower entry, so a selection depends on nothing but its row.
"""

import torch
from epdserve.kernels.rope import apply_rope
from epdserve.model.batch import QueryRows
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerSpec
from epdserve.model.layers.arithmetic import Arithmetic, IndexQueries
from epdserve.model.layers.context import ForwardContext


class Indexer:
    """Queries of an index source layer; the caches hold the keys, score and choose."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, math: Arithmetic) -> None:
        text, prefix = config.text, f"layers.{spec.index}.attn.indexer."
        self.spec, self.heads, self.dim = spec, text.index_n_heads, text.index_head_dim
        self.wq_b = math.projection(prefix + "wq_b.weight", quantized=True)
        self.weights_proj = math.projection(prefix + "weights_proj.weight", quantized=False)
        self.scale = text.index_head_dim**-0.5 * text.index_n_heads**-0.5

    def select(
        self, x_TD: torch.Tensor, qr_TR: torch.Tensor, rows: QueryRows, context: ForwardContext
    ) -> None:
        """Have this layer's selection made (and the candidates, in the candidate source)."""
        context.caches.select(self.spec, rows, lambda: self.queries(x_TD, qr_TR, rows))

    def queries(self, x_TD: torch.Tensor, qr_TR: torch.Tensor, rows: QueryRows) -> IndexQueries:
        """Index queries (T, heads, I), rotated, and head weights (T, heads)."""
        q_THI = apply_rope(self.wq_b(qr_TR).unflatten(-1, (self.heads, self.dim)), *rows.compressed_rotation)
        return IndexQueries(q_THI, self.weights_proj(x_TD).float() * self.scale)
