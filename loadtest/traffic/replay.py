"""Public traces as sessions of one request: Mooncake's (with prefixes that are shared) and Azure's (lengths only).

A trace is for larger machines than most: ``speed`` divides times and ``scale`` multiplies lengths. A block of
Mooncake's trace becomes a text of its own; equal blocks are equal texts, so prompts share what the trace shares.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from epdserve.loadtest.traces import BLOCK_TOKENS, TracedRequest, read_azure, read_mooncake
from epdserve.loadtest.traffic.lexicon import Lexicon
from epdserve.loadtest.traffic.sessions import Session, Turn

_FEWEST_TOKENS: Final = 1


def read_trace(path: Path) -> list[TracedRequest]:
    """Requests of a trace, in order of time; its format is told by its name: ``.jsonl[.gz]`` or ``.csv[.gz]``.

    Raises:
        ValueError: Neither.
        OSError: It cannot be read.
    """
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if suffixes[-1:] == [".jsonl"]:
        return read_mooncake(path)
    if suffixes[-1:] == [".csv"]:
        return read_azure(path)
    raise ValueError(f"{path.name} is neither .jsonl nor .csv")


def replay(
    trace: Sequence[TracedRequest], lexicon: Lexicon, *, speed: float, scale: float, limit: int
) -> list[Session]:
    """The first ``limit`` requests as sessions.

    Raises:
        ValueError: Speed or scale is not positive.
    """
    if speed <= 0 or scale <= 0:
        raise ValueError(f"speed and scale must be positive, got {speed} and {scale}")
    start = trace[0].at_s if trace else 0.0
    return [
        _session(request, lexicon, (request.at_s - start) / speed, scale, number)
        for number, request in enumerate(trace[:limit])
    ]


def _session(request: TracedRequest, lexicon: Lexicon, at_s: float, scale: float, number: int) -> Session:
    tokens = max(lexicon.overhead, round(request.prompt_tokens * scale))
    wanted = tokens - lexicon.overhead
    block_tokens = max(1, round(BLOCK_TOKENS * scale))
    blocks = request.blocks or (f"alone/{number}",)
    words: list[str] = []
    for block in blocks:
        draw = random.Random(f"block/{block}")
        size = block_tokens if request.blocks else wanted
        words += draw.choices(lexicon.words, k=size)
    # the last block may be part full, and rounding may leave a few tokens over
    words += random.Random(f"rest/{number}").choices(lexicon.words, k=max(0, wanted - len(words)))
    text = " ".join(("go", *words[:wanted]))
    answer = max(_FEWEST_TOKENS, round(request.answer_tokens * scale))
    turn = Turn([{"role": "user", "content": text}], answer, prompt_tokens=tokens)
    return Session(at_s, "replay", [turn])
