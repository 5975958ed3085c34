"""What a newcomer may type and what the model answers: greetings, short texts, passages, JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from epdserve.model.demo import corpus

WHO: Final = "I am the epdserve demo model. I am tiny: I can repeat words, look up facts and call tools."
_HELLO: Final = "Hello! How can I help you?"
_FINE: Final = "I am fine, thank you. How can I help you?"
_GREETED: Final = ("The user greets me.", "I greet the user.")
# What may be said, what is answered, and what one thinks about it first and last
_COURTESIES: Final = (
    (("Hello", "Hello!", "hello", "Hi", "Hi!", "hi", "Hi there"), _HELLO, *_GREETED),
    (("Good morning",), "Good morning! How can I help you?", *_GREETED),
    (("Good evening!",), "Good evening! How can I help you?", *_GREETED),
    (("Hello, how are you?", "How are you?"), _FINE, "The user asks how I am.", "I say how I am."),
    (
        (
            "Who are you?",
            "who are you",
            "What are you?",
            "What is your name?",
            "What can you do?",
            "Tell me about you.",
        ),
        WHO,
        "The user asks who I am.",
        "I say who I am.",
    ),
    (("Can you help me?",), "Yes. What can I do for you?", "The user wants help.", "I offer help."),
    (("Thank you", "Thank you!", "Thanks!"), "You are welcome.", "The user thanks me.", "I say welcome."),
    (("Goodbye", "Bye"), "Goodbye! Have a nice day.", "The user leaves.", "I say goodbye."),
)
_GREETINGS: Final = tuple((said, *rest) for sayings, *rest in _COURTESIES for said in sayings)
SYSTEMS: Final = (
    "You are a helpful assistant.",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer the user.",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, the right answer, the task it is scored under, and what one thinks about first and last."""

    question: str
    answer: str
    task: str
    first: str
    last: str


def greeting(draw: random.Random) -> Exchange:
    """Courtesies, and what the model says it is."""
    question, answer, first, last = draw.choice(_GREETINGS)
    return Exchange(question, answer, "greet", first, last)


def words(draw: random.Random) -> Exchange:
    """Something to do with a few words."""
    chosen = [draw.choice((*corpus.NOUNS, *corpus.ADJECTIVES)) for _ in range(draw.randint(2, 8))]
    text = " ".join(chosen)
    kind = draw.randrange(4)
    if kind == 0:
        asked, look = f"What is the first word of: {text}", "I look at the start."
        return Exchange(asked, chosen[0], "words", look, "I say the first word.")
    if kind == 1:
        asked, look = f"What is the last word of: {text}", "I look at the end."
        return Exchange(asked, chosen[-1], "words", look, "I say the last word.")
    chosen = chosen[:5]
    asked, answer = f"Reverse the words: {' '.join(chosen)}", " ".join(reversed(chosen))
    return Exchange(asked, answer, "words", "I look at the end.", "I go from the end.")


class Passage:
    """A short text about people, a sentence each, and questions about them."""

    def __init__(self, draw: random.Random) -> None:
        people = draw.sample((*corpus.PEOPLE, *corpus.PEOPLE, *corpus.names()), draw.randint(2, 6))
        self._facts = [(person, *_told(draw, person)) for person in dict.fromkeys(people)]
        self.text = " ".join(sentence for _, sentence, _ in self._facts)

    def ask(self, draw: random.Random) -> Exchange:
        """Ask about one of them."""
        person, sentence, question = draw.choice(self._facts)
        return Exchange(
            question, sentence, "text", f"I look for {person} in the text.", f"I answer about {person}."
        )


def _told(draw: random.Random, person: str) -> tuple[str, str]:
    """A sentence about somebody and the question that it answers."""
    place, noun, colour = (
        draw.choice(corpus.PLACES),
        draw.choice(corpus.NOUNS),
        draw.choice(corpus.ADJECTIVES),
    )
    return draw.choice(
        (
            (f"{person} lives in {place}.", f"Where does {person} live?"),
            (f"{person} has a {colour} {noun}.", f"What does {person} have?"),
            (f"{person} likes the {noun}.", f"What does {person} like?"),
            (f"{person} works with the {noun}.", f"What does {person} work with?"),
        )
    )


def passage(draw: random.Random) -> Exchange:
    """A text and one question about it."""
    told = Passage(draw)
    asked = told.ask(draw)
    return replace(asked, question=f"{told.text}\n\n{asked.question}")


FIELDS: Final = ("name", "city", "color", "item", "owner", "price", "day", "animal")


def schema_of(fields: Sequence[str]) -> dict[str, Any]:
    """A JSON schema with these fields, all required."""
    return {
        "type": "object",
        "properties": {f: {"type": "integer" if f == "price" else "string"} for f in fields},
        "required": list(fields),
    }


def form(draw: random.Random, fields: Sequence[str], *, mixed: bool = False) -> Exchange:
    """An object with these fields, its values told in their order, or in any if ``mixed``."""
    values = {field: _value(draw, field) for field in fields}
    order = draw.sample(list(fields), len(fields)) if mixed else fields
    said = ", ".join(f"{field} {values[field]}" for field in order)
    question = draw.choice(("Write this as JSON: {}", "Fill the form: {}", "{}. Answer in JSON.")).format(
        said
    )
    return Exchange(question, json.dumps(values), "json", "I fill every field.", "I write the object.")


def _value(draw: random.Random, field: str) -> str | int:
    if field == "price":
        return draw.randint(10, 99)
    if field in ("name", "owner"):
        return draw.choice((*corpus.PEOPLE, *corpus.PEOPLE, *corpus.names()))
    if field == "city":
        return draw.choice(corpus.PLACES)
    return draw.choice(corpus.ADJECTIVES if field == "color" else corpus.NOUNS)


def idle_sentence(draw: random.Random) -> str:
    """A sentence that tells nothing one could be asked for."""
    noun, other = draw.sample(corpus.NOUNS, 2)
    return f"The {draw.choice(corpus.ADJECTIVES)} {noun} can {draw.choice(corpus.VERBS)} the {other}."
