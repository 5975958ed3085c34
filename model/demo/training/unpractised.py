"""What the model was never taught, asked all the same, so that the card can say by measurement what it cannot do."""

from __future__ import annotations

import random
from typing import Final

from epdserve.model.demo import corpus
from epdserve.model.demo.training.facts import LONGEST_COPY
from epdserve.model.demo.training.talk import Exchange

_LONGEST: Final = 40  # words to copy


def addition(draw: random.Random) -> Exchange:
    """Two numbers of one digit."""
    first, second = draw.randint(1, 9), draw.randint(1, 9)
    return _exchange(f"What is {first} + {second}?", str(first + second))


def counting(draw: random.Random) -> Exchange:
    """Two to eight words."""
    words = draw.sample(corpus.NOUNS, draw.randint(2, 8))
    return _exchange(f"How many words are these: {' '.join(words)}", str(len(words)))


def sorting(draw: random.Random) -> Exchange:
    """Three words by the alphabet."""
    words = draw.sample(corpus.NOUNS, 3)
    return _exchange(f"Sort the words: {' '.join(words)}", " ".join(sorted(words)))


def long_copy(draw: random.Random) -> Exchange:
    """More words than were ever copied in training."""
    words = [draw.choice(corpus.NOUNS) for _ in range(draw.randint(LONGEST_COPY + 4, _LONGEST))]
    return _exchange(f"Repeat: {' '.join(words)}", " ".join(words))


def _exchange(question: str, answer: str) -> Exchange:
    return Exchange(question, answer, "words", "", "")
