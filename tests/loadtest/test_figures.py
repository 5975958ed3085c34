import pytest
from epdserve.loadtest.client import Outcome
from epdserve.loadtest.figures import Figures, Spread, decode_rate, percentile


def outcome(sent_at: float, text_at: list[float], tokens: int) -> Outcome:
    usage = {"prompt_tokens": 10, "completion_tokens": tokens, "prompt_cache_hit_tokens": 4}
    return Outcome(sent_at, text_at=text_at, ended_at=text_at[-1], finish_reason="length", usage=usage)


@pytest.mark.parametrize(("rank", "value"), [(1, 1.0), (50, 2.0), (75, 3.0), (99, 4.0), (100, 4.0)])
def test_percentile_is_a_measured_value(rank: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], rank) == value


def test_spread_leaves_out_what_was_not_measured() -> None:
    assert Spread.of([None, 3.0, None]) == Spread(3.0, 3.0, 3.0, 3.0)
    assert Spread.of([None]) is None


def test_figures_of_two_streams() -> None:
    figures = Figures.of([outcome(0.0, [0.1, 0.2, 0.3], 3), outcome(1.0, [1.3, 2.0], 5)])
    assert (figures.requests, figures.failed, figures.completion_tokens) == (2, 0, 8)
    assert figures.tokens_per_s == pytest.approx(4.0)
    assert figures.cached_tokens == 8
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.worst == pytest.approx(300.0)
    assert figures.itl_ms is not None
    assert figures.itl_ms.worst == pytest.approx(175.0)


def test_a_failed_request_is_counted_and_named() -> None:
    broken = Outcome(0.0, ended_at=0.5, error="503: full")
    figures = Figures.of([outcome(0.0, [0.1, 1.0], 2), broken])
    assert figures.failed == 1
    assert ("error", "503: full") in figures.rows()


def test_a_stream_without_an_end_is_a_failure() -> None:
    assert not Outcome(0.0, text_at=[0.1], ended_at=0.2).ok


def test_decode_rate_counts_only_while_all_streams_run() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0], [1.5, 2.5, 3.5, 4.5]
    assert decode_rate([(early, 4), (late, 4)]) == pytest.approx(3 / 1.5)


def test_decode_rate_spreads_tokens_over_pieces_of_text() -> None:
    assert decode_rate([([0.0, 1.0, 2.0], 9)]) == pytest.approx(8 / 2.0)


def test_decode_rate_needs_streams_that_run_together() -> None:
    with pytest.raises(ValueError, match="did not overlap"):
        decode_rate([([0.0, 1.0], 2), ([2.0, 3.0], 2)])


def test_figures_need_an_outcome() -> None:
    with pytest.raises(ValueError, match="no outcomes"):
        Figures.of([])
