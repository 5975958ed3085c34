"""Checks of the indexer and of sparse attention over packed pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from epdserve.kernels.attention.entries import Selected, Window
from epdserve.kernels.attention.reference import sink_attention_ref
from epdserve.kernels.attention.sparse import sparse_attention
from epdserve.kernels.indexer.pages import IndexPages, RowTiles
from epdserve.kernels.indexer.reference import candidate_mask_ref, top_entries_ref
from epdserve.kernels.indexer.score import score_blocks, score_pages
from epdserve.kernels.indexer.select import candidate_blocks, top_entries
from epdserve.kernels.quant.reference import (
    dequantize_fp4_e4m3_ref,
    dequantize_fp4_e8m0_ref,
    dequantize_fp8_ref,
)
from epdserve.kernels.rope.reference import apply_rope_inverse_ref
from epdserve.loadtest.gpu.case import Case, CaseMaker, compare, first_problem, same_bits
from epdserve.loadtest.gpu.data import bf16, index_pages, nibbles, powers, selected, windows
from epdserve.loadtest.gpu.shapes import Shapes
from torch import Tensor

_CHECKED_ENTRIES = 4096  # of a long row, compared with the reference


def makers(shapes: Shapes, device: str) -> Iterator[tuple[str, CaseMaker]]:
    """Name and maker of each case; the longest context is scored for as many rows as fit in memory well."""
    rows, long = shapes.prefill_rows, shapes.contexts[-1]
    batch = shapes.decode_rows[min(1, len(shapes.decode_rows) - 1)]
    yield f"index scores, prefill, T={rows}", partial(_scores, [rows], rows, True, shapes, device)
    for count in shapes.decode_rows:
        yield f"index scores, T={count}, E={long}", partial(_scores, [1] * count, long, False, shapes, device)
        yield f"candidate scores, T={count}", partial(_candidates, count, long, shapes, device)
    for count, entries in dict.fromkeys(((rows, rows), (batch, long), (1, long))):
        yield f"top entries, T={count}, E={entries}", partial(_top, count, entries, shapes, device)
    yield f"candidate blocks, T={batch}, E={long}", partial(_blocks, batch, long, shapes, device)
    for count in dict.fromkeys((rows, *shapes.decode_rows)):
        yield f"sparse attention, T={count}", partial(_attention, count, True, shapes, device)
    yield f"window attention, T={rows}", partial(_attention, rows, False, shapes, device)


def _query(rows: int, shapes: Shapes, device: str) -> tuple[Tensor, Tensor, Tensor]:
    heads, dim = shapes.index_heads, shapes.index_dim
    return (
        nibbles(rows, heads, dim // 2, device=device),
        powers(rows, heads, dim // 32, device=device),
        torch.randn(rows, heads, device=device) * (dim * heads) ** -0.5,
    )


def _keys(pages: IndexPages, segment: int, entries: int) -> Tensor:
    """Float64 keys of the first entries of a segment."""
    count = -(-entries // pages.entries_per_page)
    rows = pages.pages_PB[pages.table_SP[segment, :count].long()]
    values = rows[:, : pages.scales_offset].unflatten(1, (pages.entries_per_page, -1)).flatten(0, 1)
    scales = rows[:, pages.scales_offset :].unflatten(1, (pages.entries_per_page, -1)).flatten(0, 1)
    return dequantize_fp4_e8m0_ref(values, scales)[:entries].double()


def _exact(q: Tensor, scale: Tensor, w: Tensor, key_ED: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (rows, E) in float64, and the bound of float32 sums."""
    wide = dequantize_fp4_e8m0_ref(q, scale).double()
    dot = torch.einsum("thd,ed->the", wide, key_ED).clamp(min=0)
    bound = torch.einsum("thd,ed->the", wide.abs(), key_ED.abs())
    terms = 2.0**-23 * q.shape[1] * 2 * q.shape[2]
    return torch.einsum("th,the->te", w.double(), dot), terms * torch.einsum(
        "th,the->te", w.double().abs(), bound
    )


def _scores(counts: list[int], entries: int, causal: bool, shapes: Shapes, device: str) -> Case:
    rows = sum(counts)
    q, scale, w = _query(rows, shapes, device)
    pages = index_pages(shapes, len(counts), entries, device)
    visible = (
        torch.arange(1, rows + 1, device=device) if causal else torch.full((rows,), entries, device=device)
    )
    tiles = RowTiles.of(counts, device)

    def run() -> Tensor:
        return score_pages(q, scale, w, pages, tiles, visible, entries)

    def check() -> str:
        got, some = run(), range(max(0, rows - shapes.checked_rows), rows) if causal else range(min(rows, 4))
        problems = []
        for row in some:
            seen, one = min(int(visible[row]), _CHECKED_ENTRIES), slice(row, row + 1)
            key = _keys(pages, 0 if causal else row, seen)
            problems.append(compare(got[one, :seen], *_exact(q[one], scale[one], w[one], key)))
        last, one = rows - 1, slice(rows - 1, rows)
        table = pages.table_SP[-1:]
        single = IndexPages(pages.pages_PB, table, 0, pages.scales_offset, pages.entries_per_page)
        alone = score_pages(
            q[one], scale[one], w[one], single, RowTiles.of([1], device), visible[one], entries
        )
        return first_problem(*problems, same_bits(alone[0], got[last], "alone"))

    pairs = float(visible.sum())
    key_bytes = shapes.index_dim / 2 + shapes.index_dim / 32
    moved = len(counts) * entries * key_bytes + q.numel() + 4 * w.numel() + 4 * pairs
    return Case(run, check, moved, 2 * pairs * shapes.index_heads * shapes.index_dim)


def _candidates(rows: int, entries: int, shapes: Shapes, device: str) -> Case:
    q, scale, w = _query(rows, shapes, device)
    pages = index_pages(shapes, rows, entries, device)
    segment, visible = torch.arange(rows, device=device), torch.full((rows,), entries, device=device)
    total = entries // shapes.pool_block
    picks = [torch.randperm(total, device=device)[: shapes.pool_blocks].sort().values for _ in range(rows)]
    blocks = torch.stack(picks)

    def run() -> Tensor:
        return score_blocks(q, scale, w, pages, segment, visible, blocks, shapes.pool_block)

    def check() -> str:
        inside = torch.arange(shapes.pool_block, device=device)
        entry = (blocks[:1, :, None] * shapes.pool_block + inside).flatten(1)
        whole = score_pages(q[:1], scale[:1], w[:1], pages, RowTiles.of([1], device), visible[:1], entries)
        return same_bits(run()[:1], whole.gather(1, entry), "among all entries")

    pairs = float(blocks.numel() * shapes.pool_block)
    moved = pairs * (shapes.index_dim / 2 + shapes.index_dim / 32 + 4)
    return Case(run, check, moved, 2 * pairs * shapes.index_heads * shapes.index_dim)


def _some_scores(rows: int, entries: int, device: str) -> tuple[Tensor, Tensor]:
    """Scores with many ties."""
    return torch.randn(rows, entries, device=device).mul_(64).round_(), torch.full(
        (rows,), entries, device=device
    )


def _top(rows: int, entries: int, shapes: Shapes, device: str) -> Case:
    score, visible = _some_scores(rows, entries, device)

    def check() -> str:
        got, some = top_entries(score, visible, shapes.top_entries), slice(0, min(rows, 4))
        return same_bits(got[some], top_entries_ref(score[some], visible[some], shapes.top_entries), "choice")

    moved = 4.0 * rows * entries + 8 * rows * shapes.top_entries
    return Case(lambda: top_entries(score, visible, shapes.top_entries), check, moved)


def _blocks(rows: int, entries: int, shapes: Shapes, device: str) -> Case:
    score, visible = _some_scores(rows, entries, device)

    def run() -> Tensor:
        return candidate_blocks(score, visible, shapes.pool_blocks, shapes.pool_block)

    def check() -> str:
        blocks = run()[:2]
        mask = torch.zeros(len(blocks), -(-entries // shapes.pool_block) + 1, dtype=torch.bool, device=device)
        mask.scatter_(1, blocks.masked_fill(blocks < 0, mask.shape[1] - 1), True)
        covered = mask[:, :-1].repeat_interleave(shapes.pool_block, dim=1)[:, :entries]
        expected = candidate_mask_ref(score[:2], visible[:2], shapes.pool_blocks, shapes.pool_block)
        return same_bits(covered, expected, "mask")

    return Case(run, check, 4.0 * rows * entries + 8 * rows * shapes.pool_blocks)


def _attention(rows: int, compressed: bool, shapes: Shapes, device: str) -> Case:
    q = bf16(rows, shapes.heads, shapes.latent, device=device)
    alike = rows == shapes.prefill_rows  # one request's rows; else a request each
    window = windows(shapes, [rows] if alike else [1] * rows, device)
    segment = (
        torch.zeros(rows, dtype=torch.int64, device=device) if alike else torch.arange(rows, device=device)
    )
    main = selected(shapes, segment, max(shapes.prefill_rows, 2 * shapes.top_entries), shapes.top_entries)
    sink = torch.randn(shapes.heads, device=device)
    angle = torch.randn(rows, shapes.rotary // 2, device=device)
    cos, sin = angle.cos(), angle.sin()

    def part(some: slice, one_program: bool | None = None) -> Tensor:
        offsets = main.values_offset, main.scales_offset, main.entries_per_page
        chosen = Selected(main.pages_PB, main.table_SP, segment[some], main.entries_TK[some], *offsets)
        seen = Window(window.rows_NB, window.index_TW[some])
        return sparse_attention(
            q[some],
            seen,
            chosen if compressed else None,
            sink,
            cos[some],
            sin[some],
            one_program_a_row=one_program,
        )

    def check() -> str:
        some, got = slice(0, shapes.checked_rows), part(slice(0, rows))
        kv = _entries(window, main if compressed else None, some, shapes)
        valid = torch.ones(kv.shape[:2], dtype=torch.bool, device=device)
        exact = sink_attention_ref(q[some].double().float(), kv, valid, sink, shapes.latent**-0.5)
        exact = apply_rope_inverse_ref(exact, cos[some], sin[some])
        return first_problem(
            compare(got[some], exact, float(kv.abs().max()) * 2.0**-7),
            same_bits(part(slice(0, 1)), got[:1], "alone"),
            same_bits(part(some, True), part(some, False), "both kernels"),
        )

    keys = shapes.window + (shapes.top_entries if compressed else 0)
    row_bytes = shapes.window * shapes.latent * 33 / 32
    row_bytes += shapes.top_entries * shapes.latent * 9 / 16 if compressed else 0.0
    # Entries that rows share are read from memory once
    shared = min(rows * row_bytes, window.rows_NB.numel() + main.pages_PB.numel())
    return Case(
        lambda: part(slice(0, rows)),
        check,
        shared + 4.0 * q.numel(),
        4.0 * rows * keys * shapes.heads * shapes.latent,
    )


def _entries(window: Window, main: Selected | None, some: slice, shapes: Shapes) -> Tensor:
    """(rows, keys, D) float32 of the first rows."""
    packed = window.rows_NB[window.index_TW[some]]
    kv = dequantize_fp8_ref(packed[..., : shapes.latent], packed[..., shapes.latent :])
    if main is None:
        return kv
    entry = main.entries_TK[some]
    page = main.table_SP[main.segment_T[some, None].long(), entry // main.entries_per_page]
    within = entry % main.entries_per_page
    values = main.pages_PB[:, : main.scales_offset].unflatten(1, (main.entries_per_page, -1))[page, within]
    scales = main.pages_PB[:, main.scales_offset :].unflatten(1, (main.entries_per_page, -1))[page, within]
    return torch.cat([kv, dequantize_fp4_e4m3_ref(values, scales)], dim=1)
