"""The workloads: what kinds of customers there are. Each is a function of a draw: two runs send the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from epdserve.loadtest.traffic.hostile import hostile
from epdserve.loadtest.traffic.lexicon import Lexicon
from epdserve.loadtest.traffic.pictures import picture_part
from epdserve.loadtest.traffic.sessions import Session, Turn

_SYSTEM_PROMPTS: Final = 4
_PICTURES: Final = 8
_POLITE: Final = 0  # tenant of those who are measured where others are hostile


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long things are, in tokens.

    Attributes:
        prompt: Of a first prompt, template included.
        answer: Of each answer.
        turns: Of a conversation.
        more: Of each further message of a user, or result of a tool.
        think_s: Mean pause between turns.
        vary: Lengths are drawn between 1 - vary and 1 + vary of these; 0 = always the same.
        leave_s: Clients of a cancel storm leave within so long.
    """

    prompt: int = 200
    answer: int = 32
    turns: int = 1
    more: int = 24
    think_s: float = 0.5
    vary: float = 0.0
    leave_s: float = 1.0

    def drawn(self, tokens: int, draw: random.Random) -> int:
        """A length about ``tokens``, at least 1."""
        return max(1, round(tokens * draw.uniform(1 - self.vary, 1 + self.vary)))


@dataclass(frozen=True, slots=True)
class Kitchen:
    """What a recipe may use."""

    lexicon: Lexicon
    sizes: Sizes
    seed: int


Recipe = Callable[[Kitchen, random.Random, float], Session]


def build(name: str, kitchen: Kitchen, offsets: Sequence[float]) -> list[Session]:
    """One session for each offset.

    Args:
        name: Of ``WORKLOADS``; ``mixed`` takes them by turns.

    Raises:
        KeyError: No such workload.
    """
    names = [one for one in WORKLOADS if one != "hostile"] if name == "mixed" else [name]
    recipes = [WORKLOADS[one] for one in names]
    return [
        recipes[number % len(recipes)](kitchen, random.Random(f"{kitchen.seed}/{name}/{number}"), at_s)
        for number, at_s in enumerate(offsets)
    ]


def chat(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """A conversation of ``turns`` turns."""
    return Session(at_s, "chat", _conversation(kitchen, draw, kitchen.sizes.prompt))


def document(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """A question about a text ten times as long as a chat's prompt."""
    return Session(at_s, "document", _conversation(kitchen, draw, 10 * kitchen.sizes.prompt))


def agent(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """An agent with tools: whatever it says, a tool's result or the next step comes back, after a pause."""
    turns = _conversation(kitchen, draw, kitchen.sizes.prompt)
    # declarations have tokens of their own, so the length of the first prompt is not known
    return Session(
        at_s, "agent", [replace(turn, prompt_tokens=None, fields={"tools": TOOLS}) for turn in turns]
    )


def image_chat(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """A question about one of a few pictures: the same picture comes again and again."""
    text = {"type": "text", "text": kitchen.lexicon.text(kitchen.sizes.more, draw)}
    picture = picture_part(draw.randrange(_PICTURES), side=56)
    return Session(
        at_s, "image", [Turn([{"role": "user", "content": [picture, text]}], kitchen.sizes.answer)]
    )


def effort_mix(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """Requests that think, at levels from 1 to 100; a third may be lowered under overload."""
    level: int | str = draw.choice(("low", "high", "max", draw.randint(1, 100)))
    fields: dict[str, Any] = {"reasoning_effort": level, "thinking": {"type": "enabled"}}
    if draw.random() < 1 / 3:
        fields["effort_floor"] = 1
    text = kitchen.lexicon.text(kitchen.sizes.drawn(kitchen.sizes.prompt, draw), draw)
    turn = Turn([_user(text)], 4 * kitchen.sizes.answer, exact_answer=False, fields=fields)
    return Session(at_s, "effort", [turn])


def shared_prompts(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """A short question behind one of a few long system prompts, the first of them the most used."""
    number = min(int(draw.paretovariate(1.0)) - 1, _SYSTEM_PROMPTS - 1)
    theirs = random.Random(f"{kitchen.seed}/system/{number}")
    system = {"role": "system", "content": kitchen.lexicon.text(4 * kitchen.sizes.prompt, theirs)}
    question = _user(kitchen.lexicon.text(kitchen.sizes.more, draw))
    return Session(at_s, "shared", [Turn([system, question], kitchen.sizes.answer)])


def cancel_storm(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """Nine of ten leave, before the first token or between others."""
    leave_s = draw.uniform(0.01, kitchen.sizes.leave_s) if draw.random() < 0.9 else None
    text = kitchen.lexicon.text(kitchen.sizes.prompt, draw)
    return Session(at_s, "cancel", [Turn([_user(text)], 4 * kitchen.sizes.answer, leave_after_s=leave_s)])


def adversaries(kitchen: Kitchen, draw: random.Random, at_s: float) -> Session:
    """A fifth are chats of the first tenant, whose figures count; the others are what the rest do to it."""
    if draw.random() < 0.2:
        return Session(at_s, "polite", chat(kitchen, draw, at_s).turns, _POLITE)
    what, turn = hostile(kitchen.lexicon, kitchen.sizes.prompt, kitchen.sizes.answer, draw)
    return Session(at_s, f"hostile: {what}", [turn], 1 + draw.randrange(3))


WORKLOADS: Final[Mapping[str, Recipe]] = {
    "chat": chat,
    "document": document,
    "agent": agent,
    "image": image_chat,
    "effort": effort_mix,
    "shared": shared_prompts,
    "cancel": cancel_storm,
    "hostile": adversaries,
}

TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}},
        },
    }
    for name, description, argument in (
        ("read_file", "Read a file", "path"),
        ("run_tests", "Run the tests", "target"),
        ("search", "Search the code", "query"),
    )
]


def _conversation(kitchen: Kitchen, draw: random.Random, prompt: int) -> list[Turn]:
    sizes, lexicon = kitchen.sizes, kitchen.lexicon
    tokens = max(lexicon.overhead, sizes.drawn(prompt, draw))
    first = [_user(lexicon.prompt(tokens, draw))]
    turns = [Turn(first, sizes.drawn(sizes.answer, draw), prompt_tokens=tokens)]
    for _ in range(sizes.turns - 1):
        message = _user(lexicon.text(sizes.drawn(sizes.more, draw), draw))
        pause_s = draw.expovariate(1 / sizes.think_s) if sizes.think_s > 0 else 0.0
        turns.append(Turn([message], sizes.drawn(sizes.answer, draw), think_s=pause_s))
    return turns


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
