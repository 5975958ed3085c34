"""The wide way's caches: rows are packed on their way in, gathered and widened to float32 on their way out.

A Reuse layer attends to what its index source selected, and a Reindex layer scores the keys of its KV source; both are
gathered and widened once a step (spec/backbone 4 and 5).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from epdserve.kernels.attention import sink_attention
from epdserve.kernels.indexer import candidate_mask, score_entries, top_entries
from epdserve.kernels.rope import apply_rope, apply_rope_inverse
from epdserve.model.batch import EntryPlan, ForwardBatch, QueryRows, Rotation, RowGroup, WindowPlan
from epdserve.model.config import ModelConfig
from epdserve.model.entry_codec import EntryCodec
from epdserve.model.layer_plan import LayerMode, LayerSpec
from epdserve.model.layers.arithmetic import IndexQueries
from epdserve.model.pools import KVPools


@dataclass(frozen=True, slots=True)
class Selection:
    """Compressed entries that each query attends to, ascending, padded on the right."""

    entries_TK: torch.Tensor  # int64, -1 = none
    kv_TKD: torch.Tensor  # float32, arbitrary where entries_TK is -1


class WideCaches:
    """See ``arithmetic.Caches``. Keys of the dictionaries are layer indices."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, pools: KVPools, codec: EntryCodec) -> None:
        text = config.text
        self._batch, self._pools, self._codec = batch, pools, codec
        self._topk, self._scale = text.index_topk, text.head_dim**-0.5
        self._pool_blocks, self._block_size = text.candidate_topk_blocks, text.candidate_block_size
        self._selections: dict[int, Selection] = {}  # by index source
        self._candidates: list[torch.Tensor | None] = []  # by row group: (S', Q, E) bool, None = all

    def write_window(
        self, layer: int, kv_TD: torch.Tensor, rotation: Rotation, plan: WindowPlan
    ) -> torch.Tensor:
        """(S * R + T, D) float32: window keys, as ``WindowPlan.index_TW`` counts them."""
        new_rows, new_values = self._codec.encode_window(apply_rope(kv_TD, *rotation))
        windows = self._pools.windows[layer]
        ring_SRB = windows.index_select(0, self._batch.slots_S)
        keys = torch.cat([self._codec.decode_window(ring_SRB).flatten(0, 1), new_values])
        windows.flatten(0, 1).index_copy_(0, plan.write_places_N, new_rows.index_select(0, plan.write_rows_N))
        return keys

    def write_entries(
        self, layer: int, latent_ND: torch.Tensor, key_NI: torch.Tensor, plan: EntryPlan
    ) -> None:
        """See Caches."""
        main = self._codec.encode_main(apply_rope(latent_ND, *plan.rotation))
        index = self._codec.encode_index(apply_rope(key_NI, *plan.rotation))
        self._pools.planes[layer].write(plan.pages_N, plan.entries_N, main, index)

    def select(self, spec: LayerSpec, rows: QueryRows, queries: Callable[[], IndexQueries]) -> None:
        """See Caches."""
        entries_TK = self._choose(spec, rows, queries)
        plane = self._pools.planes[_kv_source(spec)]
        clamped_TK = entries_TK.clamp_min(0)
        page_TK = self._batch.page_table_SP[rows.segments_T[:, None], clamped_TK // plane.entries_per_page]
        kv_TKD = self._codec.decode_main(*plane.read_main(page_TK, clamped_TK % plane.entries_per_page))
        self._selections[spec.index] = Selection(entries_TK, kv_TKD)

    def entries(self, index_source: int) -> torch.Tensor:
        """See Caches."""
        return self._selections[index_source].entries_TK

    def attend(
        self,
        spec: LayerSpec,
        q_THD: torch.Tensor,
        keys: torch.Tensor,
        sink_H: torch.Tensor,
        rotation: Rotation,
        rows: QueryRows,
        plan: WindowPlan,
    ) -> torch.Tensor:
        """See Caches."""
        kv_TND = keys.index_select(0, plan.index_TW.flatten()).view(*plan.index_TW.shape, -1)
        valid_TN = plan.valid_TW
        if spec.ratio:
            assert spec.index_source is not None, f"layer {spec.index} reads a cache without an index source"
            selection = self._selections[spec.index_source]
            kv_TND = torch.cat([kv_TND, selection.kv_TKD], dim=1)
            valid_TN = torch.cat([valid_TN, selection.entries_TK >= 0], dim=1)
        o_THD = sink_attention(q_THD.float(), kv_TND, valid_TN, sink_H, self._scale)
        return apply_rope_inverse(o_THD.to(q_THD.dtype), *rotation)

    def _choose(self, spec: LayerSpec, rows: QueryRows, queries: Callable[[], IndexQueries]) -> torch.Tensor:
        """(T, K) int64: selected entries of each row, ascending, -1 on the right."""
        visible_T = (rows.positions_T + 1) // spec.ratio
        slots_K = torch.arange(self._topk, device=visible_T.device)
        entries_TK = torch.where(slots_K < visible_T[:, None], slots_K, -1)
        crowded = [(group.max_position + 1) // spec.ratio > self._topk for group in rows.groups]
        if spec.candidate_source:
            self._candidates.extend([None] * len(rows.groups))
        if not any(crowded):
            return entries_TK  # every visible entry is selected: no score is needed
        query = queries()
        query = IndexQueries(self._codec.round_index_query(query.q_THI), query.w_TH)
        for number, group in enumerate(rows.groups):
            if crowded[number]:
                scores_SQE = self.scores(spec, query, visible_T, number, group)
                flat = group.rows_SQ.flatten()
                entries_TK[flat] = top_entries(scores_SQE.flatten(0, 1), visible_T[flat], self._topk)
        return entries_TK

    def scores(
        self, spec: LayerSpec, query: IndexQueries, visible_T: torch.Tensor, number: int, group: RowGroup
    ) -> torch.Tensor:
        """(S', Q, E) float32 of a row group; -inf outside the candidates. Queries are rounded."""
        plane = self._pools.planes[_kv_source(spec)]
        pages = -(-((group.max_position + 1) // spec.ratio) // plane.entries_per_page)
        table_SP = self._batch.page_table_SP[group.segments_S, :pages]
        key_SEI = self._codec.decode_index(*plane.read_index(table_SP)).flatten(1, 2)
        scores_SQE = score_entries(query.q_THI[group.rows_SQ], query.w_TH[group.rows_SQ], key_SEI)
        if spec.candidate_source:
            visible_R = visible_T[group.rows_SQ].flatten()
            mask_RE = candidate_mask(scores_SQE.flatten(0, 1), visible_R, self._pool_blocks, self._block_size)
            self._candidates[number] = mask_RE.view(scores_SQE.shape)
        elif spec.mode is LayerMode.REINDEX:
            mask = self._candidates[number]
            if mask is not None:
                scores_SQE = scores_SQE.masked_fill(~mask, float("-inf"))
        return scores_SQE

    def round_queries(self, query: IndexQueries) -> IndexQueries:
        """As the caches' format rounds them before scoring."""
        return IndexQueries(self._codec.round_index_query(query.q_THI), query.w_TH)


def _kv_source(spec: LayerSpec) -> int:
    assert spec.kv_source is not None, f"layer {spec.index} selects from no cache"
    return spec.kv_source
