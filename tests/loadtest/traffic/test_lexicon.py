"""Lengths are exact on a server whose tokenizer is not known."""

import random

import pytest
from epdserve.loadtest.client import new_client
from epdserve.loadtest.traffic.lexicon import Lexicon, counter, learn
from support.toy_openai import TEMPLATE, tokens_of, toy_server

WORDS = ("the", "of", "and", "longword", "to", "extraordinary", "a")


@pytest.mark.parametrize("tokenize", [True, False])
async def test_words_of_one_token_are_found_by_asking(tokenize: bool) -> None:
    with toy_server(tokenize=tokenize) as server:
        async with new_client(server.url, api_key=None, silence_s=5, connections=2) as client:
            lexicon = await learn(counter(client, "toy", plain=True), WORDS)
        assert sorted(lexicon.words) == ["a", "and", "of", "the", "to"]
        assert lexicon.overhead == TEMPLATE + 1
        assert lexicon.pair == 2 * (TEMPLATE + 1)
        assert bool(server.bodies) is not tokenize


@pytest.mark.parametrize("tokens", [6, 7, 100, 4001])
def test_a_prompt_has_just_so_many_tokens(tokens: int) -> None:
    lexicon = Lexicon(("a", "of", "to", "the"), overhead=TEMPLATE + 1)
    content = lexicon.prompt(tokens, random.Random(tokens))
    assert tokens_of([{"role": "user", "content": content}]) == tokens


def test_a_prompt_shorter_than_its_template_is_refused() -> None:
    lexicon = Lexicon(("a", "of", "to", "the"), overhead=TEMPLATE + 1)
    with pytest.raises(ValueError, match="at least 6"):
        lexicon.prompt(5, random.Random(0))


async def test_a_tokenizer_without_plain_words_is_told_apart() -> None:
    with toy_server() as server:
        async with new_client(server.url, api_key=None, silence_s=5, connections=2) as client:
            with pytest.raises(RuntimeError, match="only 1 words"):
                await learn(counter(client, "toy", plain=True), ("longword", "a", "extraordinary"))
