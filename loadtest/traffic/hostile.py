"""What tenants do to one another: greed, haste and nonsense. Each is one turn; nonsense must be refused."""

from __future__ import annotations

import random
from typing import Any, Final

from epdserve.loadtest.traffic.lexicon import Lexicon
from epdserve.loadtest.traffic.sessions import Turn

KINDS: Final = ("greedy", "thrashing", "leaving", "invalid fields", "unknown model", "deep")
_DEPTH: Final = 400


def hostile(lexicon: Lexicon, prompt: int, answer: int, draw: random.Random) -> tuple[str, Turn]:
    """One of ``KINDS`` and its request.

    Args:
        prompt: Tokens of a polite customer's prompt.
        answer: Tokens of his answer.
    """
    kind = draw.choice(KINDS)
    text = lexicon.text(max(1, prompt), draw)
    if kind == "greedy":
        return kind, Turn([_user(text)], 8 * answer)
    if kind == "thrashing":  # long prompts that nobody sends again push others' blocks out
        return kind, Turn([_user(lexicon.text(8 * prompt, draw))], 1)
    if kind == "leaving":
        return kind, Turn([_user(text)], 4 * answer, leave_after_s=draw.uniform(0.01, 0.3))
    return kind, Turn([_user(text)], answer, fields=_nonsense(kind, draw), refusal_expected=True)


def _nonsense(kind: str, draw: random.Random) -> dict[str, Any]:
    if kind == "unknown model":
        return {"model": f"none-{draw.randrange(1000)}"}
    if kind == "deep":
        nested: Any = 0
        for _ in range(_DEPTH):
            nested = [nested]
        return {"metadata": nested, "temperature": "hot"}
    return draw.choice(({"temperature": 7}, {"max_tokens": -1}, {"messages": "hello"}, {"top_p": "all"}))


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
