"""Times of whole layers: a prefill chunk, decode steps at several contexts, and what decoder replay saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from epdserve.kernels.indexer.pages import RowTiles
from epdserve.loadtest.gpu.data import index_pages, selected, windows
from epdserve.loadtest.gpu.layers import Flow, Rows, Weights, layer
from epdserve.loadtest.gpu.shapes import Kind, Shapes
from epdserve.loadtest.gpu.timing import Timer

Measured = tuple[str, float]  # what, seconds


def time_decode(shapes: Shapes, weights: Weights, timer: Timer, device: str) -> Iterator[Measured]:
    """Each kind of layer for one row of each of B requests, and the sum over the model's 40 layers."""
    for batch in shapes.decode_rows:
        for context in shapes.contexts:
            yield from _decode_at(batch, context, shapes, weights, timer, device)


def _decode_at(
    batch: int, context: int, shapes: Shapes, weights: Weights, timer: Timer, device: str
) -> Iterator[Measured]:
    """One combination; its caches, tens of gigabytes at worst, go with it."""
    rows = _rows(shapes, [1] * batch, context, device)
    total = 0.0
    for kind in shapes.decode_kinds:  # the candidates of one kind come from the full layer before it
        seconds = _time_layer(kind, weights, rows, timer, device)
        total += kind.value[1] * seconds
        yield f"decode B={batch}, context {context}: layer {kind.value[0]}", seconds
    yield f"decode B={batch}, context {context}: 40 layers", total


def time_prefill(shapes: Shapes, weights: Weights, timer: Timer, device: str) -> Iterator[Measured]:
    """Each kind of layer for one chunk from position 0."""
    rows = _rows(shapes, [shapes.prefill_rows], shapes.prefill_rows, device)
    for kind in shapes.prefill_kinds:
        seconds = _time_layer(kind, weights, rows, timer, device)
        yield f"prefill T={shapes.prefill_rows}: layer {kind.value[0]}", seconds


def time_replay(shapes: Shapes, weights: Weights, timer: Timer, device: str) -> Iterator[Measured]:
    """A prefill of 20 + 20 layers, with all rows above the cut and with the last window of rows only.

    The cut layer writes keys for all rows and attends with the kept ones; it counts as one above it, a little in
    favour of neither: its key projections are under a hundredth of a layer.
    """
    everyone = _rows(shapes, [shapes.prefill_rows], shapes.prefill_rows, device)
    kept = _last_rows(everyone, min(shapes.window, shapes.prefill_rows), device)
    below = [Kind.WINDOW, Kind.WINDOW, *([Kind.FULL_PAIRS, *[Kind.REUSE_PAIRS] * 5] * 3)][
        : shapes.layers_below
    ]
    above = [Kind.FULL, *[Kind.REUSE] * 3, *([Kind.REINDEX, *[Kind.REUSE] * 3] * 4)][: shapes.layers_above]
    start = Flow.random(shapes.prefill_rows, shapes, device)
    for name, rows in (("all rows", everyone), ("decoder replay", kept)):

        def stack(rows: Rows = rows) -> None:
            flow = start
            for kind in below:
                flow = layer(kind, weights, flow, everyone)
            flow = flow.last(len(rows.segment_T))
            for kind in above:
                flow = layer(kind, weights, flow, rows)

        yield (
            f"prefill T={shapes.prefill_rows}, {len(below)} + {len(above)} layers: {name}",
            timer.seconds(stack),
        )


def _time_layer(kind: Kind, weights: Weights, rows: Rows, timer: Timer, device: str) -> float:
    flow = Flow.random(len(rows.segment_T), weights.shapes, device)
    return timer.seconds(lambda: layer(kind, weights, flow, rows))


def _rows(shapes: Shapes, counts: list[int], context: int, device: str) -> Rows:
    """Rows at the end of contexts of ``context`` tokens, a segment each; caches are random bytes."""
    segment = torch.repeat_interleave(
        torch.arange(len(counts), device=device), torch.tensor(counts, device=device)
    )
    position = torch.cat([torch.arange(context - count, context, device=device) for count in counts])
    frequency = 160_000.0 ** (-torch.arange(shapes.rotary // 2, device=device) * 2 / shapes.rotary)
    angle = position[:, None].float() * frequency
    main = selected(shapes, segment, context, min(shapes.top_entries, context))
    return Rows(
        cos=angle.cos(),
        sin=angle.sin(),
        window=windows(shapes, counts, device),
        counts=counts,
        segment_T=segment,
        position_T=position,
        tiles=RowTiles.of(counts, device),
        index=index_pages(shapes, len(counts), context, device),
        main=main,
    )


def _last_rows(rows: Rows, count: int, device: str) -> Rows:
    """The last rows of the only segment."""
    some = slice(len(rows.segment_T) - count, None)
    return replace(
        rows,
        cos=rows.cos[some].contiguous(),
        sin=rows.sin[some].contiguous(),
        window=replace(rows.window, index_TW=rows.window.index_TW[some].contiguous()),
        counts=[count],
        segment_T=rows.segment_T[some].contiguous(),
        position_T=rows.position_T[some].contiguous(),
        tiles=RowTiles.of([count], device),
        main=replace(
            rows.main,
            segment_T=rows.main.segment_T[some].contiguous(),
            entries_TK=rows.main.entries_TK[some].contiguous(),
        ),
        blocks=None,
    )
