"""The description of the API: every path that is served is in it, and answers are what it says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import jsonschema
import pytest
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from support.conformance import Bench, bench, block, invoke, parameter, spoken

SAID = spoken("r</think>ok\n\n", block(invoke("f", parameter("p", "a"))))
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "chat/completions": [
        {},
        {"tools": [CHAT_TOOL], "n": 2, "logprobs": True, "top_logprobs": 1, "receipt": True},
        {"thinking": {"type": "disabled"}, "prompt_logprobs": 1},
        {"temperature": 9},
    ],
    "completions": [{"prompt": "x"}, {"prompt": ["x"], "logprobs": 1, "echo": True}, {"prompt": ""}],
    "messages": [{"max_tokens": 99}, {"max_tokens": 99, "receipt": True}, {"max_tokens": 0}],
    "count_tokens": [{}, {"messages": 5}],
    "responses": [{"input": "x"}, {"input": "x", "max_output_tokens": 2}, {"input": 5}],
    "detokenize": [{"tokens": [5]}, {"tokens": -1}],
    "tokenize": [{"return_token_strs": True}, {"messages": None}],
}


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        one.cluster.script.ids = SAID
        yield one


async def test_every_path_is_described(router: Bench) -> None:
    document = (await router.http.get("/openapi.json")).json()
    app = create_app(
        RouterConfig(model_dir="unused", model_name="demo"), router.cluster, tokenizer=_tokenizer()
    )
    assert set(app.direct) <= set(document["paths"])
    assert {"/health", "/ready", "/v1/models", "/v1/models/{name}"} <= set(document["paths"])
    assert "ValidationError" not in str(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]


def _tokenizer() -> Any:
    from support.real_tokenizer import real_tokenizer

    return real_tokenizer()


async def test_bodies_list_their_fields(router: Bench) -> None:
    schemas = (await router.http.get("/openapi.json")).json()["components"]["schemas"]
    assert {"messages", "tools", "response_format", "n", "logit_bias"} <= set(
        schemas["ChatBody"]["properties"]
    )
    assert {"prompt", "suffix", "echo"} <= set(schemas["CompletionBody"]["properties"])
    assert schemas["ChatBody"]["required"] == ["model", "messages"]


async def test_answers_are_what_the_description_says(router: Bench) -> None:
    document = (await router.http.get("/openapi.json")).json()
    seen = set()
    for path, operations in document["paths"].items():
        if "post" not in operations:
            continue
        ending = next(ending for ending in REQUESTS if path.endswith(ending))
        for fields in REQUESTS[ending]:
            response = await router.post(path, **fields)
            described = operations["post"]["responses"][str(response.status_code)]
            schema = described["content"]["application/json"]["schema"]
            jsonschema.validate(response.json(), {**schema, "components": document["components"]})
            seen.add((ending, response.status_code))
    assert seen == {(ending, status) for ending in REQUESTS for status in (200, 400)}
