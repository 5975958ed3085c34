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
    "Now I can answer.",
)


def draw_effort(draw: random.Random) -> int:
    """One of the four levels mostly, else any number."""
    return draw.choice(EFFORTS) if draw.random() < 0.8 else draw.randint(1, 100)


def steps_of(effort: int) -> int:
    """Steps that an effort asks for: that of the nearest of the four levels, the higher one on ties."""
    return _STEPS_A_QUARTER * max(1, min(4, (effort + 12) // 25))


def reasoning(effort: int, thought: str) -> str:
    """Numbered steps; the first says what this question needs."""
    sentences = (thought, *_FILLERS)
    return " ".join(f"{number}. {sentences[number - 1]}" for number in range(1, steps_of(effort) + 1))
