"""The packed way's caches: kernels write, score and attend to entries where they lie; nothing is widened in memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from epdserve.kernels.attention import sparse_attention
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.cache_ops import write_index_k, write_main_kv, write_window_kv
from epdserve.kernels.indexer import (
    candidate_blocks,
    entries_of_slots,
    score_blocks,
    score_pages,
    top_entries,
)
from epdserve.kernels.indexer.pages import ROWS_PER_TILE, IndexPages, RowTiles
from epdserve.kernels.quant import quantize_fp4_e8m0
from epdserve.model.batch import EntryPlan, ForwardBatch, QueryRows, Rotation, WindowPlan
from epdserve.model.config import ModelConfig
from epdserve.model.kv_layout import Plane
from epdserve.model.layer_plan import LayerMode, LayerSpec
from epdserve.model.layers.arithmetic import IndexQueries
from epdserve.model.pools import KVPools

SCORE_BYTES = 1 << 30  # of scores held at once; longer chunks are chosen for part by part


@dataclass(frozen=True, slots=True)
class _Place:
    """Slots and ring rows of a step's window rows; slot -1 = nowhere."""

    slot_N: torch.Tensor
    ring_N: torch.Tensor


class PackedCaches:
    """See ``arithmetic.Caches``."""

    def __init__(self, config: ModelConfig, batch: ForwardBatch, pools: KVPools) -> None:
        text = config.text
        self._batch, self._pools = batch, pools
        self._topk, self._window = text.index_topk, text.sliding_window
        self._pool_blocks, self._block_size = text.candidate_topk_blocks, text.candidate_block_size
        self._entries: dict[int, torch.Tensor] = {}  # by index source
        self._blocks_TC: torch.Tensor | None = None  # candidates; None = all entries
        # Index arithmetic of the step, by the object it is of: the same for all layers.
        self._places: dict[int, _Place] = {}
        self._windows: dict[int, torch.Tensor] = {}
        self._tiles: dict[tuple[int, int], list[tuple[slice, RowTiles]]] = {}

    def write_window(
        self, layer: int, kv_TD: torch.Tensor, rotation: Rotation, plan: WindowPlan
    ) -> torch.Tensor:
        """(N, D + D / 32) uint8: window rows as ``Window`` of the kernels counts them.

        Where no row overwrites what another one sees, rows go straight into the rings and are read there. Else new
        rows stand behind a copy of the rings of this step's segments.
        """
        windows = self._pools.windows[layer]
        if plan.pool_TW is not None:
            place = self._place_of(plan)
            write_window_kv(windows, place.slot_N, place.ring_N, kv_TD, *rotation)
            rows_NB: torch.Tensor = windows.flatten(0, 1)
            return rows_NB
        rows = torch.arange(len(kv_TD), device=kv_TD.device)
        new_1TB = windows.new_empty(1, len(kv_TD), windows.shape[2])
        write_window_kv(new_1TB, torch.zeros_like(rows), rows, kv_TD, *rotation)
        ring_RB = windows.index_select(0, self._batch.slots_S).flatten(0, 1)
        kept = new_1TB[0].index_select(0, plan.write_rows_N)
        windows.flatten(0, 1).index_copy_(0, plan.write_places_N, kept)
        return torch.cat([ring_RB, new_1TB[0]])

    def write_entries(
        self, layer: int, latent_ND: torch.Tensor, key_NI: torch.Tensor, plan: EntryPlan
    ) -> None:
        """See Caches."""
        pages, plane = self._pools.pages, self._pools.planes[layer].plane
        where = (pages, plan.pages_N, plan.entries_N)
        write_main_kv(
            *where,
            latent_ND,
            *plan.rotation,
            entries=plane.entries_per_block,
            values_offset=plane.main_values_offset,
            scales_offset=plane.main_scales_offset,
        )
        write_index_k(
            *where,
            key_NI,
            *plan.rotation,
            entries=plane.entries_per_block,
            values_offset=plane.index_values_offset,
            scales_offset=plane.index_scales_offset,
        )

    def select(self, spec: LayerSpec, rows: QueryRows, queries: Callable[[], IndexQueries]) -> None:
        """See Caches."""
        most = (rows.max_position + 1) // spec.ratio
        visible_T = (rows.positions_T + 1) // spec.ratio
        if spec.candidate_source:
            self._blocks_TC = None
        if most <= self._topk:  # every visible entry is selected: no score is needed
            slots_K = torch.arange(self._topk, device=visible_T.device)
            self._entries[spec.index] = torch.where(slots_K < visible_T[:, None], slots_K, -1)
            return
        query = queries()
        packed = (*quantize_fp4_e8m0(query.q_THI), query.w_TH)
        if spec.mode is LayerMode.REINDEX and self._blocks_TC is not None:
            chosen = self._among_candidates(spec, rows, packed, visible_T, self._blocks_TC)
        else:
            chosen = self._among_all(spec, rows, packed, visible_T, most)
        self._entries[spec.index] = chosen

    def entries(self, index_source: int) -> torch.Tensor:
        """See Caches."""
        return self._entries[index_source]

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
        selected = None
        if spec.ratio:
            assert spec.index_source is not None, f"layer {spec.index} reads a cache without an index source"
            plane = self._plane(spec)
            selected = Selected(
                self._pools.pages,
                self._batch.page_table_SP,
                rows.segments_T,
                self._entries[spec.index_source],
                plane.main_values_offset,
                plane.main_scales_offset,
                plane.entries_per_block,
            )
        return sparse_attention(q_THD, Window(keys, self._window_of(plan)), selected, sink_H, *rotation)

    def _among_all(
        self,
        spec: LayerSpec,
        rows: QueryRows,
        packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        visible_T: torch.Tensor,
        most: int,
    ) -> torch.Tensor:
        """Scores of every entry, for as many rows at once as their bytes allow."""
        pages, columns = self._index_pages(spec), -(-most // 4) * 4
        chosen, blocks = [], []
        count = min(self._pool_blocks, -(-columns // self._block_size))
        for part, tiles in self._parts(rows, columns):
            visible = visible_T[part]
            q, scale, w = (tensor[part] for tensor in packed)
            scores_RE = score_pages(q, scale, w, pages, tiles, visible, columns)
            chosen.append(top_entries(scores_RE, visible, self._topk))
            if spec.candidate_source:
                blocks.append(candidate_blocks(scores_RE, visible, count, self._block_size))
        if blocks:
            self._blocks_TC = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _among_candidates(
        self,
        spec: LayerSpec,
        rows: QueryRows,
        packed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        visible_T: torch.Tensor,
        blocks_TC: torch.Tensor,
    ) -> torch.Tensor:
        pages = self._index_pages(spec)
        scores_TK = score_blocks(*packed, pages, rows.segments_T, visible_T, blocks_TC, self._block_size)
        every = torch.full_like(visible_T, scores_TK.shape[1])
        return entries_of_slots(top_entries(scores_TK, every, self._topk), blocks_TC, self._block_size)

    def _index_pages(self, spec: LayerSpec) -> IndexPages:
        plane = self._plane(spec)
        return IndexPages(
            self._pools.pages,
            self._batch.page_table_SP,
            plane.index_values_offset,
            plane.index_scales_offset,
            plane.entries_per_block,
        )

    def _plane(self, spec: LayerSpec) -> Plane:
        assert spec.kv_source is not None, f"layer {spec.index} reads no cache"
        return self._pools.planes[spec.kv_source].plane

    def _parts(self, rows: QueryRows, columns: int) -> list[tuple[slice, RowTiles]]:
        """Rows in parts whose scores are at most ``SCORE_BYTES`` (a tile of rows at least), with their tiles."""
        key = (id(rows), columns)
        if key not in self._tiles:
            if rows.tiles_R3 is not None:
                self._tiles[key] = [(slice(None), RowTiles(rows.tiles_R3))]
            else:
                device = rows.rows_T.device
                most = max(ROWS_PER_TILE, SCORE_BYTES // (4 * columns))
                self._tiles[key] = [
                    (part, RowTiles.of(counts, device)) for part, counts in _row_parts(rows.counts, most)
                ]
        return self._tiles[key]

    def _place_of(self, plan: WindowPlan) -> _Place:
        if id(plan) not in self._places:
            places = plan.write_places_N
            slot = torch.div(places, self._window, rounding_mode="floor")
            self._places[id(plan)] = _Place(slot, places % self._window)
        return self._places[id(plan)]

    def _window_of(self, plan: WindowPlan) -> torch.Tensor:
        """Rows of ``write_window``'s result that each query sees, -1 = none."""
        if plan.pool_TW is not None:
            return plan.pool_TW
        if id(plan) not in self._windows:
            self._windows[id(plan)] = torch.where(plan.valid_TW, plan.index_TW, -1)
        return self._windows[id(plan)]


def _row_parts(counts: tuple[int, ...], most: int) -> Iterator[tuple[slice, list[int]]]:
    """Consecutive rows, at most ``most`` at a time: where they stand, and how many of each segment they are."""
    begin, total = 0, sum(counts)
    while begin < total:
        end, first, inside = min(begin + most, total), 0, []
        for count in counts:
            inside.append(max(0, min(end, first + count) - max(begin, first)))
            first += count
        yield slice(begin, end), inside
        begin = end
