"""Tokenize and detokenize agree with what the other endpoints do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.conformance import TOOL, USER, Bench, bench, spoken


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_text_to_ids_and_back(router: Bench, prefix: str) -> None:
    text = "Hello <think> \N{PILE OF POO}"
    answer = (
        await router.post(prefix + "/tokenize", messages=None, prompt=text, return_token_strs=True)
    ).json()
    assert answer["tokens"] == spoken(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 4096
    back = (await router.post(prefix + "/detokenize", tokens=answer["tokens"])).json()
    assert back == {"prompt": text}


async def test_a_conversation_is_rendered_as_chat_renders_it(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    fields = {"tools": [TOOL], "reasoning_effort": 61}
    await router.post(**fields)
    answer = (await router.post("/tokenize", **fields)).json()
    assert answer["tokens"] == router.prompt
    continued = [*USER, {"role": "assistant", "content": "I am"}]
    body = {"messages": continued, "continue_final_message": True, "add_generation_prompt": False}
    assert (await router.post("/tokenize", **body)).json()["tokens"][-2:] == spoken("I am")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": "x"}),  # and messages
        ("/tokenize", {"messages": None}),
        ("/tokenize", {"messages": None, "prompt": 5}),
        ("/detokenize", {"tokens": [10**7]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ],
)
async def test_what_cannot_be_is_refused(router: Bench, path: str, fields: dict[str, object]) -> None:
    assert (await router.post(path, **fields)).status_code == 400


async def test_the_model_may_be_left_out(router: Bench) -> None:
    assert (await router.http.post("/tokenize", json={"prompt": "x"})).json()["count"] == 1
    assert (await router.http.post("/tokenize", json={"prompt": "x", "model": "gpt"})).status_code == 404
