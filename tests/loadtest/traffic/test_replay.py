"""Traces become prompts of the traced length that share what the trace says they share."""

import gzip
from pathlib import Path

import pytest
from epdserve.loadtest.traces import TracedRequest, generate
from epdserve.loadtest.traffic.lexicon import Lexicon
from epdserve.loadtest.traffic.replay import read_trace, replay
from support.toy_openai import tokens_of

LEXICON = Lexicon(("a", "of", "to", "the"), overhead=6)


def test_azure_s_rows_are_read_with_their_times(tmp_path: Path) -> None:
    file = tmp_path / "azure_small.csv.gz"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:04.0319600,3180,8"]
    with gzip.open(file, "wt") as out:
        out.write("\n".join([*rows, "2023-11-16 18:17:03.9799600,4808,10"]))
    first, second = read_trace(file)
    assert (first.prompt_tokens, first.answer_tokens, first.blocks) == (4808, 10, ())
    assert second.at_s - first.at_s == pytest.approx(0.052, abs=1e-5)


def test_another_file_is_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither"):
        read_trace(tmp_path / "trace.txt")


def test_equal_blocks_are_equal_text_and_lengths_are_the_scaled_ones() -> None:
    trace = [
        TracedRequest(100.0, 1024, (1, 2), 50),
        TracedRequest(110.0, 1300, (1, 2, 3), 20),
        TracedRequest(120.0, 700, (), 10),
        TracedRequest(130.0, 700, (), 10),
    ]
    sessions = replay(trace, LEXICON, speed=10, scale=0.1, limit=4)
    assert [session.at_s for session in sessions] == [0.0, 1.0, 2.0, 3.0]
    turns = [session.turns[0] for session in sessions]
    assert [turn.max_tokens for turn in turns] == [5, 2, 1, 1]
    texts = [str(turn.messages[0]["content"]) for turn in turns]
    assert [tokens_of(list(turn.messages)) for turn in turns] == [102, 130, 70, 70]
    shared = texts[0].split()[: 1 + 51]  # one block at this scale
    assert texts[1].split()[: 1 + 51] == shared
    assert texts[2] != texts[3]


def test_every_made_up_request_gets_its_length() -> None:
    trace = generate(5, conversations=20)
    for request, session in zip(trace, replay(trace, LEXICON, speed=1, scale=0.05, limit=999), strict=True):
        turn = session.turns[0]
        assert turn.prompt_tokens == max(6, round(request.prompt_tokens * 0.05))
        assert tokens_of(list(turn.messages)) == turn.prompt_tokens


def test_speed_and_scale_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        replay([], LEXICON, speed=0, scale=1, limit=1)
