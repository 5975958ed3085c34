"""What requests say: bodies of chat requests made from a seed, so that two runs send the same bytes."""

import random
from typing import Any

# Short and common words, so that even a small vocabulary needs few tokens for each.
_WORD_LIST = """
the and for you are with this that from have was not but all can one out his her time up which do
their if will way about many then them write would like so these long make thing see him two has
look more day could go come did number sound no most people my over know water than call first who
may down side been now find
"""
WORDS = tuple(_WORD_LIST.split())


def prose(words: int, draw: random.Random) -> str:
    """``words`` words in sentences; the same draw gives the same text."""
    chosen = [draw.choice(WORDS) for _ in range(words)]
    return " ".join(" ".join(chosen[at : at + 12]).capitalize() + "." for at in range(0, words, 12))


def chat(model: str, *, words: int, max_tokens: int, seed: int) -> dict[str, Any]:
    """One greedy request with a prompt of its own for each seed, answered to the last token asked for."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prose(words, random.Random(seed))}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "thinking": {"type": "disabled"},
    }


def agent_turns(model: str, *, turns: int, words: int, max_tokens: int, seed: int) -> list[dict[str, Any]]:
    """The requests of one long-running agent: each holds all that came before it and one message more.

    The answers between are canned: what is measured is the growing prefix, and two runs must send the same
    bytes.
    """
    draw = random.Random(seed)
    messages: list[dict[str, str]] = [{"role": "system", "content": prose(words, draw)}]
    requests = []
    for _ in range(turns):
        messages.append({"role": "user", "content": prose(words, draw)})
        requests.append(
            {**chat(model, words=0, max_tokens=max_tokens, seed=seed), "messages": list(messages)}
        )
        messages.append({"role": "assistant", "content": prose(max(1, words // 4), draw)})
    return requests
