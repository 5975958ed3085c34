"""Texts of exactly so many tokens, on a server whose tokenizer is not known.

Most tokenizers cut a text at spaces first, so the number of tokens of words apart is the sum of theirs. Words that
cost one token each are found by asking: all of them at once, and where the sum is not right, each half. The server
counts by ``/tokenize`` where it has that, else by the usage of an answer of one token. What came back is compared with
what was asked for in every run, so a tokenizer that does otherwise shows.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import httpx
from epdserve.loadtest.client import stream_chat
from epdserve.loadtest.workloads import WORDS

Count = Callable[[list[dict[str, Any]]], Awaitable[int]]

_FIRST: Final = "go"  # a first word has no space before it, so it stands for itself
_FEWEST: Final = 4


class Lexicon:
    """Words of one token each. Texts are drawn from them: as long as asked for, to the token.

    Args:
        words: Each costs one token after a space.
        overhead: Tokens of a rendered conversation of one user message that says ``go``.
        message: Tokens that each further pair of an assistant's and a user's message ``go`` adds; 0 = not known.
    """

    def __init__(self, words: Sequence[str], overhead: int, message: int = 0) -> None:
        if len(words) < _FEWEST:
            raise ValueError(f"only {len(words)} words cost one token each, too few to tell texts apart")
        self.words, self.overhead, self.pair = tuple(words), overhead, message

    def text(self, tokens: int, draw: random.Random) -> str:
        """A text whose prompt, as the only message of a user, has ``tokens`` tokens less ``overhead``.

        Raises:
            ValueError: A negative number.
        """
        if tokens < 0:
            raise ValueError(f"tokens must not be negative, got {tokens}")
        return " ".join((_FIRST, *draw.choices(self.words, k=tokens)))

    def prompt(self, tokens: int, draw: random.Random) -> str:
        """The text of a conversation of one user message that renders to ``tokens`` tokens, template included.

        Raises:
            ValueError: The template alone has more.
        """
        if tokens < self.overhead:
            raise ValueError(f"a prompt has at least {self.overhead} tokens here, {tokens} were asked for")
        return self.text(tokens - self.overhead, draw)


async def learn(count: Count, candidates: Sequence[str] = WORDS) -> Lexicon:
    """The lexicon of a server.

    Args:
        count: Tokens of a rendered conversation.

    Raises:
        RuntimeError: Too few of the candidates cost one token each.
    """
    base = await count([_user(_FIRST)])
    singles = await _singles(count, list(dict.fromkeys(candidates)), base)
    pair = await count([_user(_FIRST), {"role": "assistant", "content": _FIRST}, _user(_FIRST)]) - base
    try:
        return Lexicon(singles, base, pair)
    except ValueError as error:
        raise RuntimeError(str(error)) from None


async def _singles(count: Count, words: list[str], base: int) -> list[str]:
    told = await count([_user(" ".join((_FIRST, *words)))]) - base
    if told == len(words):
        return words
    if len(words) == 1:
        return []
    half = len(words) // 2
    return [*await _singles(count, words[:half], base), *await _singles(count, words[half:], base)]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def counter(client: httpx.AsyncClient, model: str, *, plain: bool) -> Count:
    """Counts as the server would render: by ``/tokenize``, or by an answer of one token.

    The counter raises RuntimeError when the server does neither.
    """
    fields: dict[str, Any] = {} if plain else {"thinking": {"type": "disabled"}}

    async def count(messages: list[dict[str, Any]]) -> int:
        body = {"model": model, "messages": messages, **fields}
        answer = await client.post("/tokenize", json=body)
        if answer.status_code == httpx.codes.OK:
            return int(answer.json()["count"])
        outcome = await stream_chat(client, {**body, "max_tokens": 1, "temperature": 0}, receipt=not plain)
        if not outcome.prompt_tokens:
            raise RuntimeError(f"cannot count tokens: {outcome.error or 'the server tells no usage'}")
        return outcome.prompt_tokens

    return count
