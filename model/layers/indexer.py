"""Lightning indexer: which compressed entries a query attends to, with the hierarchical candidate pool.

Scores are float32; ties go to the lower entry, so a selection depends on nothing but its row (spec/backbone 5).
"""

from collections.abc import Mapping

import torch
from epdserve.kernels.indexer import candidate_mask, score_entries, top_entries
from epdserve.kernels.rope import apply_rope
from epdserve.model.batch import QueryRows, RowGroup
from epdserve.model.config import ModelConfig
from epdserve.model.layer_plan import LayerMode, LayerSpec
from epdserve.model.layers.context import ForwardContext, Selection
from epdserve.model.layers.linear import Linear
from epdserve.model.precision import Precision


class Indexer:
    """Query side of an index source layer."""

    def __init__(
        self, config: ModelConfig, spec: LayerSpec, weights: Mapping[str, torch.Tensor], precision: Precision
    ) -> None:
        text, prefix = config.text, f"layers.{spec.index}.attn.indexer."
        self.spec = spec
        self.heads, self.dim, self.topk = text.index_n_heads, text.index_head_dim, text.index_topk
        self.pool_blocks, self.pool_block_size = text.candidate_topk_blocks, text.candidate_block_size
        self.wq_b = Linear(weights[prefix + "wq_b.weight"], precision, quantized=True)
        self.weights_proj = Linear(weights[prefix + "weights_proj.weight"], precision, quantized=False)
        self.scale = text.index_head_dim**-0.5 * text.index_n_heads**-0.5

    def select(
        self, x_TD: torch.Tensor, qr_TR: torch.Tensor, rows: QueryRows, context: ForwardContext
    ) -> None:
        """Put this layer's selection (and candidates, in the candidate source) into the context."""
        entries_TK = self._entries(x_TD, qr_TR, rows, context)
        plane = context.pools.planes[self._kv_source()]
        clamped_TK = entries_TK.clamp_min(0)
        page_TK = context.batch.page_table_SP[rows.segments_T[:, None], clamped_TK // plane.entries_per_page]
        kv_TKD = context.codec.decode_main(*plane.read_main(page_TK, clamped_TK % plane.entries_per_page))
        context.selections[self.spec.index] = Selection(entries_TK, kv_TKD)

    def _entries(
        self, x_TD: torch.Tensor, qr_TR: torch.Tensor, rows: QueryRows, context: ForwardContext
    ) -> torch.Tensor:
        """(T, K) int64: selected entries of each row, ascending, -1 on the right."""
        visible_T = (rows.positions_T + 1) // self.spec.ratio
        slots_K = torch.arange(self.topk, device=visible_T.device)
        entries_TK = torch.where(slots_K < visible_T[:, None], slots_K, -1)
        crowded = [self._crowded(group) for group in rows.groups]
        if self.spec.candidate_source:
            context.candidates.extend([None] * len(rows.groups))
        if not any(crowded):
            return entries_TK  # every visible entry is selected: no score is needed
        q_THI, w_TH = self.queries(x_TD, qr_TR, rows, context)
        for number, group in enumerate(rows.groups):
            if crowded[number]:
                scores_SQE = self.scores(q_THI, w_TH, visible_T, number, group, context)
                flat = group.rows_SQ.flatten()
                entries_TK[flat] = top_entries(scores_SQE.flatten(0, 1), visible_T[flat], self.topk)
        return entries_TK

    def queries(
        self, x_TD: torch.Tensor, qr_TR: torch.Tensor, rows: QueryRows, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries (T, heads, I), rotated and rounded, and head weights (T, heads), both float32."""
        q_THI = apply_rope(self.wq_b(qr_TR).unflatten(-1, (self.heads, self.dim)), *rows.compressed_rotation)
        return context.codec.round_index_query(q_THI), self.weights_proj(x_TD).float() * self.scale

    def scores(
        self,
        q_THI: torch.Tensor,
        w_TH: torch.Tensor,
        visible_T: torch.Tensor,
        number: int,
        group: RowGroup,
        context: ForwardContext,
    ) -> torch.Tensor:
        """(S', Q, E) float32; -inf outside the candidates."""
        plane = context.pools.planes[self._kv_source()]
        pages = -(-((group.max_position + 1) // self.spec.ratio) // plane.entries_per_page)
        table_SP = context.batch.page_table_SP[group.segments_S, :pages]
        key_SEI = context.codec.decode_index(*plane.read_index(table_SP)).flatten(1, 2)
        scores_SQE = score_entries(q_THI[group.rows_SQ], w_TH[group.rows_SQ], key_SEI)
        if self.spec.candidate_source:
            visible_R = visible_T[group.rows_SQ].flatten()
            mask_RE = candidate_mask(
                scores_SQE.flatten(0, 1), visible_R, self.pool_blocks, self.pool_block_size
            )
            context.candidates[number] = mask_RE.view(scores_SQE.shape)
        elif self.spec.mode is LayerMode.REINDEX:
            mask = context.candidates[number]
            if mask is not None:
                scores_SQE = scores_SQE.masked_fill(~mask, float("-inf"))
        return scores_SQE

    def _crowded(self, group: RowGroup) -> bool:
        return (group.max_position + 1) // self.spec.ratio > self.topk

    def _kv_source(self) -> int:
        assert self.spec.kv_source is not None, f"layer {self.spec.index} selects from no cache"
        return self.spec.kv_source
