"""The packed model's layers by the launchers, in Triton's interpreter, against the same layers by the references.

A layer costs the interpreter seconds whatever its size, so one decode step of two requests runs through three layers
that have everything between them: Engram, compression of pairs, all entries scored, candidates, Reindex.
"""

import numpy as np
import pytest
import torch
from epdserve.kernels.dispatch import launchers_on_host
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from epdserve.model.layers.block import Block, Residual
from epdserve.model.layers.context import ForwardContext
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.weights import WeightForm
from support.golden import TINY
from support.recorder import blocks

LAYERS = (4, 6, 8)
PROMPT = 39  # the next row closes a pair; more entries than top-k, more blocks than the candidate pool
IDS = np.random.default_rng(5).integers(3, 490, (2, PROMPT + 1))


class Step:
    """A prompt's state, and one row more of each request."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.layout = backbone, backbone.layout(8)
        self.shape = backbone.batch_shape(self.layout)
        self.pages = [[3, 7, 1, 9, 5], [0, 2, 8, 4, 6]]
        self.pools = KVPools(backbone.config, self.layout, num_pages=10, num_slots=3)
        self._run(self._batch(0, PROMPT))

    def _batch(self, start: int, count: int) -> ForwardBatch:
        segments = [
            Segment(IDS[i], start, count, self.pages[i], 2 * i, outputs=Outputs.ALL) for i in range(2)
        ]
        return ForwardBatch.build(segments, self.shape)

    def _run(self, batch: ForwardBatch) -> None:
        self.backbone.forward(batch, self.pools)

    def layers(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Streams and chosen entries after each layer of the last row, every layer fed with the same streams."""
        batch = self._batch(PROMPT, 1)
        context = ForwardContext(batch, self.pools, self.backbone.caches(batch, self.pools))
        draw = torch.Generator().manual_seed(1)
        result = {}
        with torch.inference_mode():
            for layer in LAYERS:
                block = self._block(layer)
                streams = torch.randn(2, 4, 128, generator=draw).bfloat16()
                residual = Residual(streams, torch.rand(2, 4, generator=draw))
                out = block.forward(residual, batch.all_rows, batch.encoder_window, context).settled()
                result[layer] = (out.streams_TnD.float(), context.caches.entries(layer).clone())
        return result

    def _block(self, layer: int) -> Block:
        return blocks(self.backbone)[layer]


@pytest.fixture(scope="module")
def both() -> tuple[Step, dict, Step, dict]:
    backbone = Backbone.load(TINY, precision=Precision.NATIVE, form=WeightForm.STORED)
    by_reference, by_launcher = Step(backbone), Step(backbone)
    expected = by_reference.layers()
    with launchers_on_host():
        found = by_launcher.layers()
    return by_launcher, found, by_reference, expected


@pytest.mark.parametrize("layer", LAYERS)
def test_streams_after_a_layer(both, layer: int) -> None:
    """Sums in another order flip a rounding now and then: within what the golden README gives for a layer."""
    _, found, _, expected = both
    ours, theirs = found[layer][0], expected[layer][0]
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03
    assert (ours - theirs).abs().flatten(1).max(dim=1).values.median() < 0.06


@pytest.mark.parametrize("layer", LAYERS)
def test_chosen_entries(both, layer: int) -> None:
    """An index key or query on an FP4 boundary may move a score; most choices are the same, all are legal."""
    _, found, _, expected = both
    for ours, theirs in zip(found[layer][1].tolist(), expected[layer][1].tolist(), strict=True):
        assert ours == sorted(ours)
        assert len(set(ours) & set(theirs)) >= 14  # of 16


def test_entries_and_window_rows_lie_where_the_references_put_them(both) -> None:
    """Few bytes differ, by a rounding; none outside the rows that were written."""
    launched, _, reference, _ = both
    for ours, theirs in (
        (launched.pools.pages, reference.pools.pages),
        (launched.pools._window_store, reference.pools._window_store),
    ):
        assert int((ours != theirs).sum()) < 30
