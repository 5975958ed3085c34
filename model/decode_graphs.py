"""Decode steps as CUDA graphs: captured once for a number of rows and a length of the page table, then run again.

A step takes the next larger number of rows; rows that are left over write and see nothing (decode_rows.py), and rows do
not depend on one another, so a request's bits are those of any other step. Page tables come in powers of two: scores
are laid out for the longest context there can be, and a short one should not pay for a million tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import Segment
from epdserve.model.decode_rows import DecodeRows
from epdserve.model.pools import KVPools
from epdserve.model.weights import WeightForm

_LEAST_PAGES: Final = 64
_WARM_UPS: Final = 2  # the first compiles kernels


def ladder(most: int, *, least: int = 1) -> tuple[int, ...]:
    """Powers of two from ``least`` below ``most``, then ``most``."""
    steps, size = [], least
    while size < most:
        steps.append(size)
        size *= 2
    return (*steps, most)


def rung(steps: Sequence[int], wanted: int) -> int | None:
    """The least step that holds ``wanted``; None if none does."""
    return next((step for step in steps if step >= wanted), None)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step: its buffers, and where its exit vectors appear."""

    rows: DecodeRows
    graph: torch.cuda.CUDAGraph
    exit_TD: torch.Tensor


class DecodeGraphs:
    """Captured decode steps of one backbone over one pool. Owned by the step loop, not thread-safe.

    Attributes:
        captured: Graphs there are; at most a row size times a table length.
        replayed: Steps that ran as a graph.
    """

    def __init__(self, backbone: Backbone, pools: KVPools, *, most_rows: int, most_pages: int) -> None:
        self._backbone, self._pools = backbone, pools
        self._shape = backbone.batch_shape(pools.layout)
        self._row_steps = ladder(most_rows)
        self._page_steps = ladder(most_pages, least=min(_LEAST_PAGES, most_pages))
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._memory: Any = None  # a pool's handle, shared by all graphs: they never run at once
        self.replayed = 0

    @staticmethod
    def of(backbone: Backbone, pools: KVPools, *, most_rows: int) -> "DecodeGraphs | None":
        """Graphs where there can be any: on a CUDA device, in the packed way, which waits for nothing."""
        if backbone.device.type != "cuda" or backbone.form is not WeightForm.STORED:
            return None
        tokens = backbone.config.text.max_position_embeddings
        pages = min(pools.num_pages, -(-tokens // pools.layout.block_tokens))
        return DecodeGraphs(backbone, pools, most_rows=most_rows, most_pages=pages)

    @property
    def captured(self) -> int:
        """See the class."""
        return len(self._graphs)

    def size_for(self, segments: Sequence[Segment]) -> tuple[int, int] | None:
        """Rows and pages of the graph that runs these segments; None if none does."""
        rows = rung(self._row_steps, len(segments))
        tokens = max((s.start + s.count for s in segments), default=0)
        pages = rung(self._page_steps, -(-tokens // self._shape.block_tokens))
        return None if rows is None or pages is None or not segments else (rows, pages)

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        """(R, hidden) float32 exit vectors as ``Backbone.forward``'s; None if these are no decode rows that fit.

        While the device runs the step, the host lays out what it knows of the next one.
        """
        size = self.size_for(segments)
        if size is None:
            return None
        captured = self._graphs.get(size)
        rows = captured.rows if captured is not None else self._buffers(size)
        if not rows.takes(segments):
            return None
        if captured is None:
            captured = self._graphs[size] = self._capture(rows)
        rows.fill(segments)
        captured.graph.replay()
        self.replayed += 1
        rows.prepare_next(segments)
        return captured.exit_TD[: len(segments)].clone()

    def _buffers(self, size: tuple[int, int]) -> DecodeRows:
        return DecodeRows(self._shape, *size, self._backbone.device)

    def _capture(self, rows: DecodeRows) -> _Graph:
        """Capture a step of rows that belong to nobody: warming up and capturing write nothing."""
        device = self._backbone.device
        rows.fill(())
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._backbone.forward(rows.batch(), self._pools)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        with torch.inference_mode(), torch.cuda.graph(graph, pool=self._memory):
            exit_TD = self._backbone.forward(rows.batch(), self._pools)
        return _Graph(rows, graph, exit_TD)
