"""Span arithmetic of bounded replay."""

import pytest
from epdserve.model.replay import PrefillSpan, plan_prefill, usable_hit
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


@pytest.mark.parametrize(
    ("arguments", "span"),
    [
        ({"prompt_tokens": 50, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 0, 0)),
        ({"prompt_tokens": 128, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 0, 0)),
        ({"prompt_tokens": 129, "hit_tokens": 0}, PrefillSpan(0, 0, 0, 1, 1)),
        ({"prompt_tokens": 129, "hit_tokens": 0, "slack": 8}, PrefillSpan(0, 0, 0, 0, 0)),
        ({"prompt_tokens": 1000, "hit_tokens": 512}, PrefillSpan(384, 512, 384, 872, 872)),
        ({"prompt_tokens": 600, "hit_tokens": 512, "slack": 16}, PrefillSpan(384, 512, 384, 456, 456)),
        ({"prompt_tokens": 520, "hit_tokens": 512, "slack": 8}, PrefillSpan(384, 512, 384, 384, 384)),
        ({"prompt_tokens": 1000, "hit_tokens": 511, "has_tail": True}, PrefillSpan(511, 511, 0, 872, 872)),
        ({"prompt_tokens": 600, "hit_tokens": 590, "has_tail": True}, PrefillSpan(590, 590, 0, 590, 0)),
        ({"prompt_tokens": 1000, "hit_tokens": 0, "exact": True}, PrefillSpan(0, 0, 0, 0, 0)),
    ],
)
def test_spans(arguments: dict[str, int], span: PrefillSpan) -> None:
    assert plan_prefill(window=128, **arguments) == span  # type: ignore[arg-type]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="hit of 10 tokens in a prompt of 10"):
        plan_prefill(prompt_tokens=10, hit_tokens=10, window=8)
    with pytest.raises(ValueError, match="exact"):
        plan_prefill(prompt_tokens=100, hit_tokens=64, window=8, exact=True)


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
