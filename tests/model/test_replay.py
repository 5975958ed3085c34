"""Span arithmetic of bounded replay."""

import pytest
from epdserve.model.replay import Halo, PrefillSpan, plan_prefill, usable_hit
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("cached", "prompt", "expected"),
    [
        (0, 500, 0),
        (96, 500, 0),  # at most one window: it would replay all of itself
        (128, 500, 0),
        (160, 500, 160),
        (176, 500, 160),  # ends on a block boundary
        (512, 512, 480),  # a full hit leaves at least one token to compute
        (512, 513, 512),
    ],
)
def test_hits_without_a_tail(cached: int, prompt: int, expected: int) -> None:
    assert usable_hit(cached, prompt_tokens=prompt, window=128, block_tokens=32, has_tail=False) == expected


def test_a_tail_makes_any_length_a_hit() -> None:
    assert usable_hit(5, prompt_tokens=500, window=128, block_tokens=32, has_tail=True) == 5
    assert usable_hit(500, prompt_tokens=500, window=128, block_tokens=32, has_tail=True) == 499


RELEASED = Halo.of(window=128, layers=40, cut=20)


def test_halo_of_the_released_model() -> None:
    assert (RELEASED.encoder_tokens, RELEASED.decoder_tokens, RELEASED.total_tokens) == (2540, 2413, 5080)


@pytest.mark.parametrize(
    ("arguments", "span"),
    [
        ({"prompt_tokens": 50, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 0, 0)),
        ({"prompt_tokens": 128, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 0, 0)),
        ({"prompt_tokens": 129, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 1, 1, 1)),
        ({"prompt_tokens": 129, "hit_tokens": 0, "slack": 8}, PrefillSpan(0, 0, 0, 0, 0)),
        ({"prompt_tokens": 1000, "hit_tokens": 512}, PrefillSpan(384, 512, 384, 872, 872, 872)),
        ({"prompt_tokens": 600, "hit_tokens": 512, "slack": 16}, PrefillSpan(384, 512, 384, 456, 456, 456)),
        ({"prompt_tokens": 520, "hit_tokens": 512, "slack": 8}, PrefillSpan(384, 512, 384, 384, 384, 384)),
        (
            {"prompt_tokens": 1000, "hit_tokens": 511, "has_tail": True},
            PrefillSpan(511, 511, 0, 872, 872, 872),
        ),
        ({"prompt_tokens": 600, "hit_tokens": 590, "has_tail": True}, PrefillSpan(590, 590, 0, 590, 0)),
    ],
)
def test_spans(arguments: dict[str, int], span: PrefillSpan) -> None:
    assert plan_prefill(window=128, **arguments) == span  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "span"),
    [
        ({"prompt_tokens": 1000, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 0, 0)),
        # nothing is narrowed, and yet most rows need not run above the cut
        ({"prompt_tokens": 9000, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 6586, 6586, 8872)),
        # a long way to go: the causal encoder's halo before the hit
        (
            {"prompt_tokens": 90_000, "hit_tokens": 8192},
            PrefillSpan(5652, 8192, 5652, 87_586, 87_586, 89_872),
        ),
        # nearly all is there: the halo of all layers before the end
        ({"prompt_tokens": 8200, "hit_tokens": 8192}, PrefillSpan(3119, 8192, 3119, 5786, 5786, 8072)),
        ({"prompt_tokens": 8200, "hit_tokens": 8190, "has_tail": True}, PrefillSpan(8190, 8190, 0, 8190, 0)),
        (
            {"prompt_tokens": 9000, "hit_tokens": 5000, "has_tail": True, "slack": 4},
            PrefillSpan(5000, 5000, 0, 6582, 6582, 8868),
        ),
    ],
)
def test_exact_spans_run_a_halo(arguments: dict[str, int], span: PrefillSpan) -> None:
    assert plan_prefill(window=128, halo=RELEASED, **arguments) == span  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cached", "prompt", "expected"),
    [
        (2432, 100_000, 0),  # at most the halo of the causal encoder
        (2560, 100_000, 2560),
        (5120, 5081, 0),  # the halo of all layers is the prompt
        (5120, 5121, 5120),
        (8192, 8192, 8064),
    ],
)
def test_exact_hits_without_a_tail(cached: int, prompt: int, expected: int) -> None:
    found = usable_hit(
        cached, prompt_tokens=prompt, window=128, block_tokens=128, has_tail=False, halo=RELEASED
    )
    assert found == expected


def test_tails_may_be_taken_where_all_windows_are_settled() -> None:
    span = plan_prefill(prompt_tokens=1000, hit_tokens=512, window=128, slack=2)
    assert [span.resumes_at(position, 128) for position in (511, 996, 997, 1000)] == [
        False,
        False,
        True,
        True,
    ]
    short = plan_prefill(prompt_tokens=100, hit_tokens=0, window=128)
    assert short.resumes_at(1, 128)
    assert not plan_prefill(prompt_tokens=600, hit_tokens=590, window=128, has_tail=True).resumes_at(589, 128)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="hit of 10 tokens in a prompt of 10"):
        plan_prefill(prompt_tokens=10, hit_tokens=10, window=8)


@given(
    prompt=st.integers(1, 2000),
    cached=st.integers(0, 3000),
    window=st.integers(1, 200),
    slack=st.integers(0, 20),
    blocks=st.integers(1, 64),
    tail=st.booleans(),
)
def test_spans_hold_together(
    prompt: int, cached: int, window: int, slack: int, blocks: int, tail: bool
) -> None:
    hit = usable_hit(cached, prompt_tokens=prompt, window=window, block_tokens=2 * blocks, has_tail=tail)
    span = plan_prefill(prompt_tokens=prompt, hit_tokens=hit, window=window, slack=slack, has_tail=tail)
    assert 0 <= span.first_row <= hit < prompt
    assert span.replayed_rows == (0 if tail else min(window, hit))
    assert span.first_row <= span.decoder_from < prompt  # the last row always leaves the model
    dropped = span.decoder_from > span.first_row
    assert span.decoder_floor == (prompt - window - slack if dropped else span.encoder_floor)
