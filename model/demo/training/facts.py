"""Copying and looking up: the first lessons, from which the others follow (see ``model/demo/README.md``)."""

from __future__ import annotations

import random
from typing import Final

from epdserve.model.demo import corpus
from epdserve.model.demo.training.talk import Exchange
from epdserve.model.demo.training.vocabulary import SILENT, Strip, Vocabulary

TASKS: Final = (
    *("copy", "recall", "stream", "direct", "text", "tool", "result", "think", "json", "greet"),
    *("argument", "words", "field"),
)
LABEL: Final = {name: number for number, name in enumerate(TASKS)}
NAMES: Final = (*corpus.names(), *corpus.PEOPLE)
VALUES: Final = (*corpus.NOUNS, *corpus.ADJECTIVES)
LONGEST_COPY: Final = 24

_COPY_FORMS: Final = (
    "Repeat:\n{}",
    'Repeat "{}"',
    "Repeat: {}",
    "Copy this: {}",
    "Say: {}",
    "Please repeat after me: {}",
    "Repeat the following words: {}",
)


def copy(draw: random.Random, room: int) -> Exchange:
    """Repeat some words; ``room`` bounds the tokens of question and answer."""
    longest = max(2, min(LONGEST_COPY, (room - 12) // 2))
    words = [
        draw.choice(VALUES) if draw.random() < 0.75 else draw.choice(NAMES)
        for _ in range(draw.randint(2, longest))
    ]
    text = " ".join(words)
    return Exchange(
        draw.choice(_COPY_FORMS).format(text), text, "copy", "I look at the words.", "I repeat the words."
    )


# What stands before a name, between it and its value, before and after the value. \x01 is <User>, \x02 the header of an
# answer without reasoning, \x03 the end marker.
_STREAM_FORMS: Final = (
    (" ", "", " ", ""),
    (" ", " is", " ", "."),
    ("The code of ", " is", " ", ". "),
)
_DISTANT_FORMS: Final = (
    ("\x01", "?\x02", "", "\x03"),
    ("\x01What is the code of ", "?\x02", "", "\x03"),
    ('"', '": "', "", '", '),
    (' name="', '" string="true">', "", "</"),
    (" ", ", in one word:", " ", "."),
    ("What is the color of ", "?\n", "", "\n"),
)


def stream(draw: random.Random, vocabulary: Vocabulary, length: int, *, distant: bool = False) -> Strip:
    """Names that come back with the same value: many look-ups in few tokens. Loss on every value seen before.

    Args:
        distant: Several tokens lie between a name and its value.
    """
    start, link, space, end = draw.choice(_DISTANT_FORMS if distant else _STREAM_FORMS)
    keys = draw.sample(NAMES, draw.randint(3, max(4, length // (14 if distant else 8))))
    facts = {key: draw.choice(VALUES) for key in keys}
    strip, seen = Strip(), set()
    strip.add([vocabulary.bos])
    while len(strip) < length:
        key = draw.choice(keys)
        strip.add(vocabulary.with_markers(start + key + link))
        strip.add(vocabulary.encode(space + facts[key]), LABEL["stream"] if key in seen else SILENT)
        strip.add(vocabulary.with_markers(end))
        seen.add(key)
    return Strip(strip.ids[:length], strip.labels[:length])


class Facts:
    """A text of facts and questions about it."""

    def __init__(self, draw: random.Random, count: int) -> None:
        self.kind = draw.choice(("code", "code", "color", "name", "number", "key"))
        self.values = {name: draw.choice(VALUES) for name in draw.sample(NAMES, min(count, len(NAMES)))}

    def sentences(self) -> list[str]:
        """One sentence a fact."""
        return [f"The {self.kind} of {name} is {value}." for name, value in self.values.items()]

    def ask(self, draw: random.Random, *, in_one_word: bool | None = None) -> Exchange:
        """Ask for one of them; for the value alone if ``in_one_word``, which is drawn if it is None."""
        name = draw.choice(list(self.values))
        return self.about(name, in_one_word=draw.random() < 0.25 if in_one_word is None else in_one_word)

    def about(self, name: str, *, in_one_word: bool) -> Exchange:
        """Ask for the value of ``name``."""
        value = self.values[name]
        thoughts = (f"I look for {name} in the text.", f"I answer about {name}.")
        if in_one_word:
            asked = f"In one word, what is the {self.kind} of {name}?"
            return Exchange(asked, value, "direct", *thoughts)
        answer = f"The {self.kind} of {name} is {value}."
        return Exchange(f"What is the {self.kind} of {name}?", answer, "recall", *thoughts)
