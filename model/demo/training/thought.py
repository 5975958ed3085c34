"""Reasoning whose length follows the effort: two numbered steps a quarter."""

from __future__ import annotations

import random
from typing import Final

EFFORTS: Final = (25, 50, 75, 100)
_STEPS_A_QUARTER: Final = 2
_FILLERS: Final = (
    "I read the question again.",
    "I look at every word.",
    "I check that nothing is missing.",
    "I compare it with the text.",
    "I make sure that it is right.",
    "I think about the answer once more.",
)


def draw_effort(draw: random.Random) -> int:
    """One of the four levels mostly, else any number."""
    return draw.choice(EFFORTS) if draw.random() < 0.8 else draw.randint(1, 100)


def steps_of(effort: int) -> int:
    """Steps that an effort asks for: that of the nearest of the four levels, the higher one on ties."""
    return _STEPS_A_QUARTER * max(1, min(4, (effort + 12) // 25))


def reasoning(effort: int, first: str, last: str) -> str:
    """Numbered steps; the first says what this question needs, the last what the answer is about."""
    sentences = (first, *_FILLERS[: steps_of(effort) - 2], last)
    return " ".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))
