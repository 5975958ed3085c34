"""One small call of every launcher, in rows: what it takes for each row, and what it gives for each.

Tests that hold for all of them (rows alone, gaps between rows, no row, a bad row) are written once over these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.attention.sparse import sparse_attention
from epdserve.kernels.cache_ops import pack
from epdserve.kernels.cache_ops.rows import gather_rows, scatter_rows
from epdserve.kernels.compress.pool import pool_entries, pool_pairs
from epdserve.kernels.engram.gate import engram_gate
from epdserve.kernels.engram.hash import ngram_rows
from epdserve.kernels.indexer.pages import IndexPages, RowTiles
from epdserve.kernels.indexer.score import score_blocks, score_pages
from epdserve.kernels.indexer.select import candidate_blocks, top_entries
from epdserve.kernels.linear.block_linear import grouped_linear_fp8, linear_bf16, linear_fp8
from epdserve.kernels.linear.tile import Tile
from epdserve.kernels.mhc.reference import sinkhorn_ref
from epdserve.kernels.mhc.streams import advance, collapse, expand, hyper_coefficients
from epdserve.kernels.moe.experts import combine, expert_product, swiglu_quantize
from epdserve.kernels.moe.route_rows import plan_experts, route
from epdserve.kernels.norm.rms import rms_norm
from epdserve.kernels.quant.reference import quantize_fp8_blocks_ref, quantize_fp8_ref, quantize_mxfp4_ref
from epdserve.kernels.quant.rows import quantize_fp4_e8m0, quantize_fp8
from epdserve.kernels.rope.rotate import apply_rope, apply_rope_in_place, apply_rope_inverse
from epdserve.kernels.sampling.draw import filtered_probs, sample
from epdserve.kernels.sampling.verify import accept_greedy, verify_drafts
from support.kernel_rows import generator, randn
from support.packed_pages import packed_pool, packed_windows
from torch import Tensor

ROWS = 3
Rows = tuple[Tensor, ...]
_TILE = Tile(n=16, t=8, k=32, warps=4, stages=1)
_EXPERTS, _TOP = 5, 2


@dataclass(frozen=True)
class LauncherCase:
    """A launcher at a tiny shape.

    Attributes:
        call: Takes ``rows`` and returns tensors whose first dimension is the row.
        rows: Arguments of ``ROWS`` rows each.
        moves: Whether the interpreter gives a row the same bits at any place of a tile, as a GPU does.
    """

    call: Callable[..., Tensor | Rows]
    rows: Rows
    moves: bool = True

    @cached_property
    def whole(self) -> Rows:
        """Results for all rows."""
        return self.run(*self.rows)

    def run(self, *rows: Tensor) -> Rows:
        """Results for these rows."""
        result = self.call(*rows)
        return result if isinstance(result, tuple) else (result,)


def _ids(limit: int, *shape: int, seed: int = 0, least: int = 0) -> Tensor:
    return torch.randint(least, limit, shape, generator=generator(seed))


def _packed(entries: int, kind: str, dim: int) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    pool = packed_pool(kind, 1, entries, dim)
    return pool.pages_PB, pool.table_SP, (pool.values_offset, pool.scales_offset, pool.entries_per_page)


def _attention() -> Iterator[tuple[str, LauncherCase]]:
    heads, dim, keys = 16, 64, 8
    window_rows, _ = packed_windows(20, dim)
    pages, table, offsets = _packed(20, "main", dim)
    sink = randn(heads)

    def call(q: Tensor, seen: Tensor, chosen: Tensor, cos: Tensor, sin: Tensor, *, one: bool) -> Tensor:
        segment = torch.zeros(len(q), dtype=torch.int64)
        selected = Selected(pages, table, segment, chosen, *offsets)
        return sparse_attention(q, Window(window_rows, seen), selected, sink, cos, sin, one_program_a_row=one)

    angle = randn(ROWS, 8, seed=2)
    rows = (
        randn(ROWS, heads, dim, seed=1).bfloat16(),
        _ids(20, ROWS, keys, least=-1),
        _ids(20, ROWS, keys, least=-1, seed=1),
        angle.cos(),
        angle.sin(),
    )
    for one in (False, True):
        yield f"sparse_attention/{'row' if one else 'splits'}", LauncherCase(partial(call, one=one), rows)


def _caches() -> Iterator[tuple[str, LauncherCase]]:
    pool = _ids(256, 4, 96, seed=3).to(torch.uint8)
    rows = (_ids(4, ROWS), _ids(6, ROWS) * 16)
    yield "gather_rows", LauncherCase(lambda page, offset: gather_rows(pool, page, offset, 16), rows)

    def scattered(data: Tensor) -> Tensor:
        pages, index = torch.zeros(len(data), 40, dtype=torch.uint8), torch.arange(len(data))
        scatter_rows(pages, index, torch.full_like(index, 3), data)
        return pages

    yield "scatter_rows", LauncherCase(scattered, (_ids(256, ROWS, 24).to(torch.uint8),))
    for name in ("write_main_kv", "write_index_k", "write_window_kv"):
        angle = randn(ROWS, 4, seed=2)
        yield name, LauncherCase(partial(_written, name), (randn(ROWS, 64), angle.cos(), angle.sin()))


def _written(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each row in a page of its own."""
    index = torch.arange(len(x))
    if name == "write_window_kv":
        rings = torch.zeros(len(x), 1, 66, dtype=torch.uint8)
        pack.write_window_kv(rings, index, torch.zeros_like(index), x, cos, sin)
        return rings
    pages = torch.zeros(len(x), 64, dtype=torch.uint8)
    places = {"entries": 1, "values_offset": 0, "scales_offset": 32}
    getattr(pack, name)(pages, index, torch.zeros_like(index), x, cos, sin, **places)
    return pages


def _compression() -> Iterator[tuple[str, LauncherCase]]:
    none = torch.empty(0, dtype=torch.int64)

    def entries(kept: Tensor, content: Tensor, gate: Tensor) -> Tensor:
        row = torch.arange(len(content))
        return pool_entries(content, gate, kept.contiguous().clone(), row, row, row, none, none)

    yield (
        "pool_entries",
        LauncherCase(entries, (randn(ROWS, 2, 24), randn(ROWS, 24), randn(ROWS, 24, seed=1))),
    )
    yield "pool_pairs", LauncherCase(pool_pairs, tuple(randn(ROWS, 24, seed=i) for i in range(4)))


def _engram() -> Iterator[tuple[str, LauncherCase]]:
    q, k = randn(4, 32, seed=2), randn(4, 32, seed=3)
    rows = (randn(ROWS, 4, 32), randn(ROWS, 4, 32, seed=4), randn(ROWS, 32, seed=5))
    yield "engram_gate", LauncherCase(lambda s, x, v: engram_gate(s, x, v, q, k, 1e-20), rows)
    primes, offsets = torch.tensor([[61, 67], [71, 73], [79, 83]]), torch.arange(6) * 100
    multipliers = torch.tensor([76632096046245, 4839876093313, 35959672319349, 73987337458391])
    ids = _ids(900, ROWS, 4, least=-1)
    yield "ngram_rows", LauncherCase(lambda x: ngram_rows(x, 3, multipliers, primes, offsets), (ids,))


def _indexer() -> Iterator[tuple[str, LauncherCase]]:
    score = (randn(ROWS, 40) * 2).round() / 2
    visible = torch.tensor([40, 9, 33])
    yield "top_entries", LauncherCase(lambda s, v: top_entries(s, v, 5), (score, visible))
    yield "candidate_blocks", LauncherCase(lambda s, v: candidate_blocks(s, v, 4, 4), (score, visible))
    table_pages, table, offsets = _packed(40, "index", 32)
    pages = IndexPages(table_pages, table, *offsets)
    codes, scales = quantize_fp4_e8m0(randn(ROWS, 16, 32))
    query = (codes, scales, randn(ROWS, 16, seed=1))

    def whole(codes: Tensor, scales: Tensor, w: Tensor, visible: Tensor) -> Tensor:
        alone = [
            (row, 1, 0) for row in range(len(codes))
        ]  # rows of one run are in the order of their positions
        tiles = RowTiles(torch.tensor(alone, dtype=torch.int32).view(-1, 3))
        found = score_pages(codes, scales, w, pages, tiles, visible, 40)
        return found.where(torch.arange(40) < visible[:, None], 0.0)  # beyond lies anything

    def some(codes: Tensor, scales: Tensor, w: Tensor, visible: Tensor, blocks: Tensor) -> Tensor:
        segment = torch.zeros(len(codes), dtype=torch.int64)
        return score_blocks(codes, scales, w, pages, segment, visible, blocks, 4)

    blocks = torch.tensor([[0, 3, 9], [1, 2, -1], [0, -1, -1]])
    yield "score_pages", LauncherCase(whole, (*query, visible))
    yield "score_blocks", LauncherCase(some, (*query, visible, blocks))


def _products() -> Iterator[tuple[str, LauncherCase]]:
    weight = quantize_fp8_blocks_ref(randn(16, 64, seed=1))
    fp8 = quantize_fp8_ref(randn(ROWS, 64))
    yield "linear_fp8", LauncherCase(lambda c, s: linear_fp8(c, s, *weight, tile=_TILE), fp8)
    plain = randn(16, 64, seed=2).bfloat16()
    x = randn(ROWS, 64, seed=3).bfloat16()
    yield "linear_bf16", LauncherCase(lambda x: linear_bf16(x, plain, tile=_TILE), (x,))
    groups = [quantize_fp8_blocks_ref(randn(32, 64, seed=group)) for group in range(2)]
    stored = tuple(torch.stack(parts) for parts in zip(*groups, strict=True))
    x = randn(ROWS, 2, 64, seed=4).bfloat16()
    yield "grouped_linear_fp8", LauncherCase(lambda x: grouped_linear_fp8(x, *stored, tile=_TILE), (x,))


def _streams() -> Iterator[tuple[str, LauncherCase]]:
    fn, scale, base = randn(24, 4 * 32, seed=5) * 0.2, torch.tensor([0.7, 1.1, 0.9]), randn(24, seed=6)
    comb = sinkhorn_ref(randn(ROWS, 4, 4, seed=1), 20, 1e-6).contiguous()
    streams, out, post = randn(ROWS, 4, 32), randn(ROWS, 32, seed=2), randn(ROWS, 4, seed=3).abs()
    update = (streams, out, post, comb)

    def passed(*rows: Tensor) -> Rows:
        new, collapsed, coefficients = advance(*rows, fn, scale, base, 2, 1e-6)
        return new, collapsed, *coefficients

    def mixed(streams: Tensor) -> Rows:
        return hyper_coefficients(streams, fn, scale, base, 2, 1e-6)

    yield "advance", LauncherCase(passed, (*update, post.flip(1).contiguous()), moves=False)
    yield "hyper_coefficients", LauncherCase(mixed, (streams,), moves=False)
    yield "expand", LauncherCase(expand, update)
    yield "collapse", LauncherCase(collapse, (streams, post))


def _experts() -> Iterator[tuple[str, LauncherCase]]:
    bias = randn(_EXPERTS, seed=1)
    yield "route", LauncherCase(lambda x: route(x, bias, _TOP, 1.5), (randn(ROWS, _EXPERTS),))
    weight = quantize_mxfp4_ref(randn(_EXPERTS, 16, 64, seed=1))
    chosen = torch.rand(ROWS, _EXPERTS, generator=generator(2)).topk(_TOP, dim=1).indices
    tile = replace(_TILE, t=4)

    def product(codes: Tensor, scales: Tensor, chosen: Tensor) -> Tensor:
        plan = plan_experts(chosen, _EXPERTS, tile.t)
        out = expert_product(codes, scales, *weight, plan, gather=True, tile=tile)
        return out[plan.place_P.long()].view(len(chosen), _TOP, 16)

    def summed(y: Tensor, shared: Tensor, chosen: Tensor) -> Tensor:
        plan = plan_experts(chosen, _EXPERTS, tile.t)
        return combine(y.flatten(0, 1)[plan.order_P.long()], shared, plan)

    yield "expert_product", LauncherCase(product, (*quantize_fp8_ref(randn(ROWS, 64)), chosen))
    y, shared = randn(ROWS, _TOP, 40).bfloat16(), randn(ROWS, 40, seed=1).bfloat16()
    yield "combine", LauncherCase(summed, (y, shared, chosen))
    yield "swiglu_quantize", LauncherCase(lambda x: swiglu_quantize(x, 10.0), (randn(ROWS, 128).bfloat16(),))


def _rounding() -> Iterator[tuple[str, LauncherCase]]:
    weight, x = randn(40, seed=1), randn(ROWS, 2, 64)
    yield "rms_norm", LauncherCase(lambda x: rms_norm(x, weight, 1e-20), (randn(ROWS, 40),))
    yield "quantize_fp8", LauncherCase(quantize_fp8, (randn(ROWS, 64),))
    yield "quantize_fp4_e8m0", LauncherCase(quantize_fp4_e8m0, (randn(ROWS, 64),))
    angle = randn(ROWS, 8, seed=2)
    rows = (x, angle.cos(), angle.sin())
    yield "apply_rope", LauncherCase(apply_rope, rows)
    yield "apply_rope_inverse", LauncherCase(apply_rope_inverse, rows)
    turned = LauncherCase(lambda x, cos, sin: apply_rope_in_place(x.clone(), cos, sin), rows)
    yield "apply_rope_in_place", turned


def _sampling() -> Iterator[tuple[str, LauncherCase]]:
    number = torch.arange(ROWS)
    filters = (
        torch.tensor([0.8, 0.0, 1.3]),
        torch.tensor([7, 0, 3]),
        torch.tensor([0.9, 1.0, 0.5]),
        torch.tensor([0.0, 0.1, 0.02]),
    )
    logits = randn(ROWS, 33) * 3
    yield "sample", LauncherCase(sample, (logits, *filters, number * 7919, number + 100))
    yield "filtered_probs", LauncherCase(filtered_probs, (logits, *filters))
    best, draft = _ids(2, ROWS, 4), _ids(2, ROWS, 3, seed=1)
    yield "accept_greedy", LauncherCase(accept_greedy, (best, draft, number))
    target, drafter = (randn(ROWS, 4, 20).softmax(2), randn(ROWS, 3, 20, seed=1).softmax(2))
    rows = (target, drafter, _ids(20, ROWS, 3), number, number * 7919, number + 100)
    yield "verify_drafts", LauncherCase(verify_drafts, rows)


def launcher_cases() -> dict[str, LauncherCase]:
    """By the launcher's name, and its variant after a slash."""
    families = (
        _attention, _caches, _compression, _engram, _indexer, _products, _streams, _experts, _rounding, _sampling
    )  # fmt: skip
    return dict(case for family in families for case in family())
