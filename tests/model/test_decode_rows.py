"""Decode steps in fixed buffers: the bits of a plain step, and nothing written for rows that belong to nobody."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from epdserve.model.backbone import Backbone
from epdserve.model.batch import ForwardBatch, ImageSpan, Outputs, Segment
from epdserve.model.decode_graphs import DecodeGraphs, _Graph, ladder, rung
from epdserve.model.decode_rows import DecodeRows
from epdserve.model.pools import KVPools
from epdserve.model.precision import Precision
from epdserve.model.weights import WeightForm
from support.golden import TINY

BLOCK, PAGES, SLOTS = 8, 40, 6
LENGTHS = (37, 12, 30, 3)  # open and closed pairs; one request below window and top-k
REQUESTS = [np.random.default_rng(seed).integers(3, 490, length + 8) for seed, length in enumerate(LENGTHS)]


@cache
def packed() -> Backbone:
    return Backbone.load(TINY, precision=Precision.NATIVE, form=WeightForm.STORED)


class Requests:
    """Prompts over pools of their own, each ready for its next row."""

    def __init__(self) -> None:
        backbone = packed()
        self.layout = backbone.layout(BLOCK)
        self.shape = backbone.batch_shape(self.layout)
        self.pools = KVPools(backbone.config, self.layout, num_pages=PAGES, num_slots=SLOTS)
        draw = np.random.default_rng(9).permutation(PAGES)
        self.pages = [draw[i * 8 : i * 8 + 8].tolist() for i in range(4)]
        self.next = list(LENGTHS)
        prompts = [self._segment(i, 0, length) for i, length in enumerate(LENGTHS)]
        backbone.forward(ForwardBatch.build(prompts, self.shape), self.pools)

    def _segment(self, i: int, start: int, count: int, **more: int) -> Segment:
        return Segment(REQUESTS[i], start, count, self.pages[i], i + 1, outputs=Outputs.LAST, **more)

    def step(self, members: Sequence[int], **more: int) -> list[Segment]:
        segments = [self._segment(i, self.next[i], 1, **more) for i in members]
        for i in members:
            self.next[i] += 1
        return segments

    def plain(self, segments: list[Segment]) -> torch.Tensor:
        return packed().forward(ForwardBatch.build(segments, self.shape), self.pools)

    def rows(self, rows: int = 4, pages: int = 6) -> DecodeRows:
        return DecodeRows(self.shape, rows, pages, torch.device("cpu"))


def same_state(ours: KVPools, theirs: KVPools) -> bool:
    pairs = all(torch.equal(ours.open_pairs[layer], theirs.open_pairs[layer]) for layer in ours.open_pairs)
    return (
        pairs
        and torch.equal(ours.pages, theirs.pages)
        and torch.equal(ours._window_store, theirs._window_store)
    )


@pytest.mark.parametrize("rows", [4, 7], ids=["full", "padded"])
def test_steps_have_the_bits_of_plain_steps_and_leave_the_same_state(rows: int) -> None:
    """Members come and go, in any order; every page, ring and open pair is compared, those of nobody too."""
    fixed, plain = Requests(), Requests()
    buffers = fixed.rows(rows)
    for members in ([0, 1, 2, 3], [2, 0], [3, 0, 1], [0, 1, 2, 3], [1]):
        segments = fixed.step(members)
        buffers.fill(segments)
        exits = packed().forward(buffers.batch(), fixed.pools)
        buffers.prepare_next(segments)
        assert torch.equal(exits[: len(members)], plain.plain(plain.step(members)))
        assert same_state(fixed.pools, plain.pools)


def test_rows_of_nobody_write_nothing() -> None:
    """As warming up and capturing run them."""
    requests = Requests()
    before = [requests.pools.pages.clone(), requests.pools._window_store.clone()]
    pairs = {layer: pair.clone() for layer, pair in requests.pools.open_pairs.items()}
    buffers = requests.rows()
    buffers.fill(())
    packed().forward(buffers.batch(), requests.pools)
    assert torch.equal(requests.pools.pages, before[0])
    assert torch.equal(requests.pools._window_store, before[1])
    assert all(torch.equal(requests.pools.open_pairs[layer], pair) for layer, pair in pairs.items())


@pytest.mark.parametrize(
    "floors",
    [
        {"encoder_floor": 5, "decoder_floor": 5},
        {"encoder_floor": 5, "decoder_floor": 34, "decoder_from": 34},
        {"publish_from": 38},
    ],
)
def test_floors_of_replayed_prefills_hold(floors: dict[str, int]) -> None:
    fixed, plain = Requests(), Requests()
    buffers = fixed.rows()
    buffers.fill(fixed.step([0], **floors))
    assert torch.equal(
        packed().forward(buffers.batch(), fixed.pools)[:1], plain.plain(plain.step([0], **floors))
    )
    assert same_state(fixed.pools, plain.pools)


def test_pages_that_were_replaced_meanwhile_are_written_anew() -> None:
    """A sealed page may give way to another with the same block, a preempted request comes back elsewhere."""
    requests = Requests()
    buffers = requests.rows()
    segments = requests.step([0, 2])
    buffers.fill(segments)
    buffers.prepare_next(segments)
    requests.pages[0][1] = 39
    requests.pages[2] = [*requests.pages[2][:1], 35, 36, 37, 38]
    buffers.fill(requests.step([0, 2]))
    table = buffers.batch().page_table_SP
    assert table[0, :5].tolist() == requests.pages[0][:5]
    assert table[1, :4].tolist() == requests.pages[2][:4]


def test_what_is_prepared_lacks_the_token_alone() -> None:
    requests = Requests()
    buffers = requests.rows()
    buffers.fill(requests.step([0]))
    buffers.prepare_next(requests.step([0]))
    prepared = buffers._hosts[0].columns_CT[:, 0].copy()
    buffers.fill(requests.step([0]))
    filled = buffers._flat[4 * 6 :].view(9, 4)[:, 0].numpy()
    assert (prepared != filled).nonzero()[0].tolist() == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"count": 2},
        {"outputs": Outputs.NONE},
        {"decoder_from": 38},
        {"images": [ImageSpan(37, torch.zeros(1, 128))]},
        {"start": 48},
    ],
)
def test_buffers_refuse_what_is_no_decode_row_or_does_not_fit(change: dict) -> None:
    ids = np.full(60, 5)
    arguments = {"tokens": ids, "start": 37, "count": 1, "pages": list(range(8)), "slot": 0, **change}
    buffers = Requests().rows()
    segment = Segment(**arguments)
    assert not buffers.takes([segment])
    with pytest.raises(ValueError, match="do not take 1"):
        buffers.fill([segment])


def test_buffers_refuse_too_many_rows_and_missing_pages() -> None:
    requests = Requests()
    with pytest.raises(ValueError, match="4 rows and 6 pages do not take 5"):
        requests.rows().fill(requests.step([0, 1, 2, 3]) + requests.step([0]))
    segment = Segment(REQUESTS[0], 37, 1, [1, 2], 0)
    with pytest.raises(ValueError, match="2 pages do not cover 38"):
        requests.rows().fill([segment])
    with pytest.raises(ValueError, match="empty buffers: 0 rows"):
        requests.rows(0)


@pytest.mark.parametrize(
    ("most", "least", "steps"),
    [
        (1, 1, (1,)),
        (8, 1, (1, 2, 4, 8)),
        (12, 1, (1, 2, 4, 8, 12)),
        (300, 64, (64, 128, 256, 300)),
        (5, 5, (5,)),
    ],
)
def test_sizes_are_powers_of_two_and_the_most(most: int, least: int, steps: tuple[int, ...]) -> None:
    assert ladder(most, least=least) == steps
    assert rung(steps, most) == most
    assert rung(steps, most + 1) is None
    assert rung(steps, 1) == steps[0]


class Replayed:
    """Stands for a captured graph: runs the step again over the same buffers."""

    def __init__(self, graphs: DecodeGraphs, rows: DecodeRows, exit_TD: torch.Tensor) -> None:
        self.graphs, self.rows, self.exit_TD = graphs, rows, exit_TD

    def replay(self) -> None:
        self.exit_TD.copy_(self.graphs._backbone.forward(self.rows.batch(), self.graphs._pools))


class HostGraphs(DecodeGraphs):
    """Without a device: capturing remembers the buffers."""

    def _capture(self, rows: DecodeRows) -> _Graph:
        exit_TD = torch.empty(rows.rows, self._backbone.config.text.hidden_size)
        return _Graph(rows, Replayed(self, rows, exit_TD), exit_TD)  # type: ignore[arg-type]


def test_a_step_takes_the_next_larger_graph_and_prefill_takes_none() -> None:
    fixed, plain = Requests(), Requests()
    graphs = HostGraphs(packed(), fixed.pools, most_rows=4, most_pages=6)
    for members in ([0, 1, 2], [0, 1], [3, 1, 2], [0]):
        found = graphs.forward(fixed.step(members))
        assert found is not None
        assert torch.equal(found, plain.plain(plain.step(members)))
    assert (graphs.captured, graphs.replayed) == (3, 4)  # of 4, 2 and 1 rows
    assert graphs.forward([Segment(REQUESTS[0], 0, 4, fixed.pages[0], 1)]) is None
    assert graphs.forward(fixed.step([0, 1, 2, 3]) + fixed.step([0])) is None
    assert graphs.forward([]) is None
    assert (
        graphs.size_for([Segment(np.full(99, 5), 60, 1, list(range(9)), 1)]) is None
    )  # beyond the longest table


def test_there_are_no_graphs_without_a_device() -> None:
    assert DecodeGraphs.of(packed(), Requests().pools, most_rows=4) is None
