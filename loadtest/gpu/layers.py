"""One layer of each kind at the released model's shapes, made of the launchers: random weights, packed caches.

The six kinds and how many of each the model has (spec/backbone.md 4): two layers of window only, three that compress
two tokens to one and score all entries, fifteen that reuse their choice, one that caches every token and scores all,
four that score its candidates, fifteen that reuse. One set of weights stands for all layers; it is far larger than any
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.attention.sparse import sparse_attention
from epdserve.kernels.indexer import entries_of_slots
from epdserve.kernels.indexer.pages import IndexPages, RowTiles
from epdserve.kernels.indexer.score import score_blocks, score_pages
from epdserve.kernels.indexer.select import candidate_blocks, top_entries
from epdserve.kernels.linear.block_linear import grouped_linear_fp8, linear_bf16, linear_fp8
from epdserve.kernels.mhc import advance
from epdserve.kernels.moe.experts import combine, expert_product, swiglu_quantize
from epdserve.kernels.moe.plan import expert_tile
from epdserve.kernels.moe.route_rows import plan_experts, route
from epdserve.kernels.norm import rms_norm
from epdserve.kernels.quant.rows import quantize_fp4_e8m0, quantize_fp8
from epdserve.kernels.rope import apply_rope
from epdserve.loadtest.gpu.data import bf16, fp8_codes, nibbles, small_powers
from epdserve.loadtest.gpu.shapes import Kind, Shapes
from torch import Tensor

_EPS: Final = 1e-20
_ITERS: Final = 20


@dataclass(slots=True)
class Rows:
    """Where the rows stand and what they see."""

    cos: Tensor
    sin: Tensor
    window: Window
    counts: list[int]  # rows of each segment
    segment_T: Tensor
    position_T: Tensor
    tiles: RowTiles
    index: IndexPages
    main: Selected  # its choice is replaced by the indexer's
    blocks: Tensor | None = None


class Weights:
    """Random weights of one layer in their stored formats."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        self.shapes = shapes
        mixes = shapes.copies * (shapes.copies + 2)
        self.fn = torch.randn(mixes, shapes.copies * shapes.hidden, device=device) * 0.01
        self.scale, self.base = torch.ones(3, device=device), torch.zeros(mixes, device=device)
        self.norm = torch.ones(shapes.hidden, device=device, dtype=torch.bfloat16)
        self.q_norm = torch.ones(shapes.q_rank, device=device, dtype=torch.bfloat16)
        self.kv_norm = torch.ones(shapes.latent, device=device, dtype=torch.bfloat16)
        self.sink = torch.zeros(shapes.heads, device=device)
        inputs = shapes.heads * shapes.latent // shapes.o_groups
        self.wq_a = _fp8(shapes.q_rank, shapes.hidden, device)
        self.wq_b = _fp8(shapes.heads * shapes.latent, shapes.q_rank, device)
        self.wkv = _fp8(shapes.latent, shapes.hidden, device)
        self.wo_b = _fp8(shapes.hidden, shapes.o_groups * shapes.o_rank, device)
        wo_a, wo_a_scale = _fp8(shapes.o_groups * shapes.o_rank, inputs, device)
        self.wo_a = wo_a.unflatten(0, (shapes.o_groups, -1)), wo_a_scale.unflatten(0, (shapes.o_groups, -1))
        self.index_q = _fp8(shapes.index_heads * shapes.index_dim, shapes.q_rank, device)
        self.index_w = bf16(shapes.index_heads, shapes.hidden, device=device)
        self.compress = bf16(2 * shapes.latent, shapes.hidden, device=device)
        self.index_k = bf16(shapes.index_dim, shapes.latent, device=device)
        self.gate = bf16(shapes.experts, shapes.hidden, device=device)
        self.bias = torch.zeros(shapes.experts, device=device)
        self.w13 = _fp4(shapes.experts, 2 * shapes.inner, shapes.hidden, device)
        self.w2 = _fp4(shapes.experts, shapes.hidden, shapes.inner, device)
        self.shared13 = _fp8(2 * shapes.inner, shapes.hidden, device)
        self.shared2 = _fp8(shapes.hidden, shapes.inner, device)


def _fp8(outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor]:
    scale = small_powers(-(-outputs // 32), inputs // 32, inputs=inputs, device=device)
    return fp8_codes(outputs, inputs, device=device), scale


def _fp4(experts: int, outputs: int, inputs: int, device: str) -> tuple[Tensor, Tensor]:
    scale = small_powers(experts, outputs, inputs // 32, inputs=inputs, device=device)
    return nibbles(experts, outputs, inputs // 2, device=device), scale


@dataclass(slots=True)
class Flow:
    """Residual streams, the update of the last sub-block, and the mix that the next one collapses with."""

    streams: Tensor  # (T, n, D)
    out: Tensor  # (T, D)
    post: Tensor
    comb: Tensor
    carried: Tensor

    @classmethod
    def random(cls, rows: int, shapes: Shapes, device: str) -> Flow:
        """Of rows that come from some layer before."""
        copies = shapes.copies
        carried = torch.zeros(rows, copies, device=device)
        carried[:, 0] = 1.0
        return cls(
            bf16(rows, copies, shapes.hidden, device=device),
            bf16(rows, shapes.hidden, device=device),
            torch.rand(rows, copies, device=device),
            torch.full((rows, copies, copies), 1.0 / copies, device=device),
            carried,
        )

    def last(self, count: int) -> Flow:
        """The last rows."""
        parts = (self.streams, self.out, self.post, self.comb, self.carried)
        return Flow(*(part[-count:].contiguous() for part in parts))


def layer(kind: Kind, weights: Weights, flow: Flow, rows: Rows) -> Flow:
    """Both sub-blocks, each entered in one pass over the streams."""
    w = weights
    flow = _sub_block(w, flow, lambda x: attention(kind, w, x, rows))
    return _sub_block(w, flow, lambda x: experts(w, x))


def _sub_block(w: Weights, flow: Flow, block: Callable[[Tensor], Tensor]) -> Flow:
    update = (flow.streams, flow.out, flow.post, flow.comb, flow.carried)
    streams, collapsed, mixes = advance(*update, w.fn, w.scale, w.base, _ITERS, 1e-6, _EPS)
    carried, post, comb = mixes
    return Flow(streams, block(rms_norm(collapsed, w.norm, _EPS)), post, comb, carried)


def attention(kind: Kind, w: Weights, x: Tensor, rows: Rows) -> Tensor:
    """(T, hidden) -> (T, hidden); key rows are projected and normed, writing them is a case of its own."""
    shapes = w.shapes
    codes = quantize_fp8(x)
    qr = quantize_fp8(rms_norm(linear_fp8(*codes, *w.wq_a), w.q_norm, _EPS))
    q = linear_fp8(*qr, *w.wq_b).unflatten(1, (shapes.heads, shapes.latent))
    q = apply_rope(q, rows.cos, rows.sin)
    apply_rope(rms_norm(linear_fp8(*codes, *w.wkv), w.kv_norm, _EPS), rows.cos, rows.sin)
    main = None if kind is Kind.WINDOW else rows.main
    if kind in (Kind.FULL_PAIRS, Kind.FULL, Kind.REINDEX):
        chosen = index(kind, w, x, qr, rows)
        offsets = rows.main.values_offset, rows.main.scales_offset, rows.main.entries_per_page
        main = Selected(rows.main.pages_PB, rows.main.table_SP, rows.segment_T, chosen, *offsets)
    o = sparse_attention(q, rows.window, main, w.sink, rows.cos, rows.sin)
    grouped = grouped_linear_fp8(o.flatten(1).unflatten(1, (shapes.o_groups, -1)), *w.wo_a)
    return linear_fp8(*quantize_fp8(grouped.flatten(1)), *w.wo_b)


def index(kind: Kind, w: Weights, x: Tensor, qr: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
    """Chosen entries (T, k); the source of the candidates leaves them in ``rows``."""
    shapes = w.shapes
    q = linear_fp8(*qr, *w.index_q).unflatten(1, (shapes.index_heads, shapes.index_dim))
    q_codes, q_scales = quantize_fp4_e8m0(apply_rope(q, rows.cos, rows.sin))
    head = linear_bf16(x, w.index_w).float() * (shapes.index_dim * shapes.index_heads) ** -0.5
    visible = (rows.position_T + 1) // kind.ratio
    if kind is Kind.REINDEX and rows.blocks is not None:
        scores = score_blocks(
            q_codes, q_scales, head, rows.index, rows.segment_T, visible, rows.blocks, shapes.pool_block
        )
        everything = torch.full_like(visible, scores.shape[1])
        slots = top_entries(scores, everything, shapes.top_entries)
        return entries_of_slots(slots, rows.blocks, shapes.pool_block)
    latent = linear_bf16(x, w.compress if kind is Kind.FULL_PAIRS else w.compress[: shapes.latent])
    linear_bf16(rms_norm(latent[:, : shapes.latent], w.kv_norm, _EPS), w.index_k)
    most = rows.index.table_SP.shape[1] * rows.index.entries_per_page // (kind.ratio if kind.ratio else 1)
    scores = score_pages(q_codes, q_scales, head, rows.index, rows.tiles, visible, most)
    if kind is Kind.FULL:
        rows.blocks = candidate_blocks(scores, visible, shapes.pool_blocks, shapes.pool_block)
    return top_entries(scores, visible, shapes.top_entries)


def experts(w: Weights, x: Tensor) -> Tensor:
    """Routed and shared experts: (T, hidden) -> (T, hidden)."""
    shapes = w.shapes
    chosen, share = route(linear_bf16(x, w.gate, out_dtype=torch.float32), w.bias, shapes.top_experts, 1.5)
    tile = expert_tile(chosen.numel(), shapes.experts)
    plan = plan_experts(chosen, shapes.experts, tile.t)
    codes = quantize_fp8(x)
    hidden = expert_product(*codes, *w.w13, plan, gather=True, tile=tile)
    routed = expert_product(*swiglu_quantize(hidden, 10.0, plan, share), *w.w2, plan, gather=False, tile=tile)
    shared = linear_fp8(*swiglu_quantize(linear_fp8(*codes, *w.shared13), 10.0), *w.shared2)
    return combine(routed, shared, plan)
