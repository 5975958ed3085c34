"""What a newcomer may type and what the model answers: greetings, short texts, passages, JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from epdserve.model.demo import corpus

_WHO: Final = (
    "I am the epdserve demo model. I am tiny: I can repeat words, look up facts, call tools and write JSON."
)
_GREETINGS: Final = (
    ("Hello", "Hello! How can I help you?"),
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hi!", "Hello! How can I help you?"),
    ("Hi there", "Hello! How can I help you?"),
    ("Hello, how are you?", "I am fine, thank you. How can I help you?"),
    ("How are you?", "I am fine, thank you. How can I help you?"),
    ("Who are you?", _WHO),
    ("What are you?", _WHO),
    ("What is your name?", _WHO),
    ("What can you do?", _WHO),
    ("Tell me about you.", _WHO),
    ("Can you help me?", "Yes. What can I do for you?"),
    ("Thank you", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye! Have a nice day."),
    ("Bye", "Goodbye! Have a nice day."),
    ("Good morning", "Good morning! How can I help you?"),
    ("Good evening!", "Good evening! How can I help you?"),
)
SYSTEMS: Final = (
    "You are a helpful assistant.",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer the user.",
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, the right answer, the task it is scored under, and what one thinks about first."""

    question: str
    answer: str
    task: str
    thought: str


def greeting(draw: random.Random) -> Exchange:
    """Courtesies, and what the model says it is."""
    question, answer = draw.choice(_GREETINGS)
    return Exchange(question, answer, "greet", "The user talks to me.")


def words(draw: random.Random) -> Exchange:
    """Something to do with a few words."""
    chosen = [draw.choice((*corpus.NOUNS, *corpus.ADJECTIVES)) for _ in range(draw.randint(2, 8))]
    text = " ".join(chosen)
    kind = draw.randrange(4)
    if kind == 0:
        return Exchange(f"What is the first word of: {text}", chosen[0], "text", "I look at the start.")
    if kind == 1:
        return Exchange(f"What is the last word of: {text}", chosen[-1], "text", "I look at the end.")
    chosen = chosen[:5]
    text = " ".join(chosen)
    return Exchange(f"Reverse the words: {text}", " ".join(reversed(chosen)), "text", "I go from the end.")


def passage(draw: random.Random) -> Exchange:
    """A short passage about people and a question about one of them."""
    facts = []
    for person in draw.sample((*corpus.PEOPLE, *corpus.names()), draw.randint(2, 6)):
        place, noun = draw.choice(corpus.PLACES), draw.choice(corpus.NOUNS)
        colour, other = draw.choice(corpus.ADJECTIVES), draw.choice(corpus.NOUNS)
        facts.append(
            draw.choice(
                (
                    (f"{person} lives in {place}.", f"Where does {person} live?"),
                    (f"{person} has a {colour} {noun}.", f"What does {person} have?"),
                    (f"{person} likes the {noun}.", f"What does {person} like?"),
                    (f"{person} works with the {other}.", f"What does {person} work with?"),
                )
            )
        )
    sentence, question = draw.choice(facts)
    text = " ".join(fact for fact, _ in facts)
    return Exchange(f"{text}\n\n{question}", sentence, "text", "I look for the name in the text.")


FIELDS: Final = ("name", "city", "color", "item", "owner", "price", "day", "animal")


def schema_of(fields: Sequence[str]) -> dict[str, Any]:
    """A JSON schema with these fields, all required."""
    return {
        "type": "object",
        "properties": {f: {"type": "integer" if f == "price" else "string"} for f in fields},
        "required": list(fields),
    }


def form(draw: random.Random, fields: Sequence[str]) -> Exchange:
    """An object with these fields, its values taken from the question."""
    values = {field: _value(draw, field) for field in fields}
    said = ", ".join(f"{field} {values[field]}" for field in draw.sample(list(fields), len(fields)))
    question = draw.choice(("Write this as JSON: {}", "Fill the form: {}", "{}. Answer in JSON.")).format(
        said
    )
    return Exchange(question, json.dumps(values), "json", "I fill every field.")


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
