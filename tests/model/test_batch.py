"""Index arithmetic of a batch, and what it refuses."""

import numpy as np
import pytest
from epdserve.model.batch import ForwardBatch, Outputs, Segment
from support.golden import tiny

TOKENS = np.arange(40, dtype=np.int64) + 3


def build(*segments: Segment) -> ForwardBatch:
    backbone = tiny("f32q")
    return ForwardBatch.build(segments, backbone.batch_shape(backbone.layout(8)))


def test_context_reaches_back_to_the_true_tokens_and_stops_at_the_start() -> None:
    batch = build(Segment(TOKENS, 0, 2, [0], 0), Segment(TOKENS, 9, 2, [1, 2], 1))
    assert batch.context_T4.tolist() == [[3, -1, -1, -1], [4, 3, -1, -1], [12, 11, 10, 9], [13, 12, 11, 10]]
    assert batch.token_ids_T.tolist() == [3, 4, 12, 13]


def test_window_keys_come_from_the_ring_before_the_segment_and_from_its_rows_after() -> None:
    window = tiny("f32q").config.text.sliding_window
    plan = build(Segment(TOKENS, 10, 3, [0, 1], 0)).encoder_window
    assert plan.valid_TW.all()
    # Position 12 sees 5..12: 5..9 in ring rows p % 8, then rows 10, 11, 12 of this step behind the ring.
    assert plan.index_TW[2].tolist() == [5, 6, 7, 0, 1, window, window + 1, window + 2]
    assert (plan.write_places_N % 8).tolist() == [2, 3, 4]


def test_window_floor_hides_what_lies_before_it() -> None:
    plan = build(Segment(TOKENS, 10, 3, [0, 1], 0, encoder_floor=9, decoder_floor=9)).encoder_window
    assert plan.valid_TW.sum(dim=1).tolist() == [2, 3, 4]


def test_only_the_last_window_of_a_long_chunk_is_written_to_the_ring() -> None:
    plan = build(Segment(TOKENS, 0, 20, [0, 1, 2], 0)).encoder_window
    assert plan.write_rows_N.tolist() == list(range(12, 20))
    assert sorted((plan.write_places_N % 8).tolist()) == list(range(8))


def test_a_pair_that_spans_two_steps_takes_its_first_half_from_the_slot() -> None:
    entries = build(Segment(TOKENS, 9, 4, [5, 6], 0)).entries[2]
    assert entries.closing_N.tolist() == [0, 2]
    assert entries.opened_in_N.tolist() == [0, -1]
    assert entries.pages_N.tolist() == [6, 6]
    assert entries.entries_N.tolist() == [0, 1]
    assert entries.store_rows_M.tolist() == [3]


def test_replayed_rows_publish_nothing() -> None:
    entries = build(Segment(TOKENS, 8, 12, [5, 6, 7], 0, publish_from=16)).entries
    assert entries[1].closing_N.tolist() == [8, 9, 10, 11]
    assert entries[2].closing_N.tolist() == [9, 11]
    assert entries[1].pages_N.tolist() == [7, 7, 7, 7]


def test_kept_rows_are_a_suffix_and_outputs_count_among_them() -> None:
    batch = build(
        Segment(TOKENS, 0, 12, [0, 1], 0, decoder_from=10, decoder_floor=10, outputs=Outputs.LAST),
        Segment(TOKENS, 4, 2, [2], 1, decoder_from=20, outputs=Outputs.NONE),
        Segment(TOKENS, 3, 1, [3], 2, outputs=Outputs.ALL),
    )
    assert batch.kept_rows.rows_T.tolist() == [10, 11, 14]
    assert batch.output_rows_R.tolist() == [1, 2]
    assert batch.decoder_window.valid_TW[:2].sum(dim=1).tolist() == [1, 2]
    assert batch.cut_window.valid_TW[:2].sum(dim=1).tolist() == [8, 8]


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        ({"start": 0, "count": 9, "pages": [0]}, "1 pages do not cover 9 tokens"),
        ({"start": 0, "count": 4, "pages": [0], "decoder_from": 4}, "before the decoder's first row"),
    ],
)
def test_impossible_batches_are_refused(segment: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(Segment(TOKENS, slot=0, **segment))  # type: ignore[arg-type]


def test_impossible_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one segment"):
        build()
    for start, count in ((0, 0), (-1, 2), (39, 2)):
        with pytest.raises(ValueError, match="over 40 tokens"):
            Segment(TOKENS, start, count, [0], 0)
