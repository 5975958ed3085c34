"""Messages: the recipe's writer as the oracle, what it does not do, and errors in Anthropic's words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import deepseek_recipe as recipe
import pytest
from epdserve.services.errors import Overloaded
from support.conformance import USER, Bench, bench, block, dsml, invoke, parameter, spoken
from support.grammars import real_vocabulary, takes
from support.real_tokenizer import real_tokenizer
from support.recipe_oracle import oracle_events, sse, without_names

PATH = "/v1/messages"
TOOL = {
    "name": "f",
    "description": "does it",
    "input_schema": {"type": "object", "properties": {"p": {"type": "string"}}},
}
OFF = {"thinking": {"type": "disabled"}}
CALL = block(invoke("f", parameter("p", 'a "b"')))


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("think</think>hello there", {}),
    ("hello there", OFF),
    ("</think>hello", {}),
    ("only thoughts", {}),
    ("", OFF),
    ("a STOP b", {**OFF, "stop_sequences": ["STOP"]}),
    ("think</think>ok\n\n" + CALL, {"tools": [TOOL]}),
    ("think" + CALL, {"tools": [TOOL]}),
    (block(invoke("f"), invoke("f", parameter("p", "x"))), {**OFF, "tools": [TOOL]}),
]


@pytest.mark.parametrize("length", [False, True], ids=["stop", "length"])
@pytest.mark.parametrize(("said", "fields"), ANSWERS, ids=range(len(ANSWERS)))
async def test_events_are_those_of_the_official_writer(
    router: Bench, said: str, fields: dict[str, Any], length: bool
) -> None:
    ids = spoken(said)
    script = router.cluster.script
    script.ids, script.stop_id, script.cached_tokens = ids, None if length else 1, 4
    limit = max(1, len(ids)) if length else 900
    body = {"model": "demo", "max_tokens": limit, "messages": USER, **fields}
    if length and not ids:
        return  # nothing can be cut off before its first token
    ours = without_names(sse((await router.post(PATH, **body, stream=True)).text))
    prompt = len(router.prompt)
    theirs = without_names(oracle_events(recipe.MessagesRequest, body, ids, length=length, usage=(prompt, 4)))
    # EOS is a sampled token, which the recipe is not told of
    eos = 0 if length or "stop_sequences" in fields else 1
    theirs[-2]["usage"]["output_tokens"] += eos
    if "stop_sequences" in fields:
        theirs[-2]["usage"]["output_tokens"] = ours[-2]["usage"]["output_tokens"]
    assert _joined(ours) == _joined(theirs)


def _joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pieces of a block's JSON in one: ours come by what was ready together."""
    found: list[dict[str, Any]] = []
    for event in events:
        piece = event.get("delta", {}).get("partial_json")
        if piece is not None and found[-1].get("delta", {}).get("type") == "input_json_delta":
            found[-1]["delta"]["partial_json"] += piece
        else:
            found.append(event)
    return found


async def test_a_whole_answer_holds_the_blocks_of_the_stream(router: Bench) -> None:
    router.cluster.script.ids = spoken("think</think>ok\n\n" + CALL)
    answer = (await router.post(PATH, max_tokens=900, tools=[TOOL])).json()
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "think", "signature": answer["id"]}
    assert text == {"type": "text", "text": "ok"}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"p": 'a "b"'})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


async def test_a_prompt_is_that_of_the_same_chat(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    await router.post(PATH, max_tokens=5, system="Be brief.", messages=USER)
    messages = router.prompt
    await router.post(messages=[{"role": "system", "content": "Be brief."}, *USER])
    assert messages == router.prompt
    await router.post(PATH, max_tokens=5, output_config={"effort": 61})
    assert router.prompt[8] == spoken("61")[0]


async def test_an_answer_that_was_begun_is_continued_without_thinking(router: Bench) -> None:
    router.cluster.script.ids = spoken(" world")
    begun = [*USER, {"role": "assistant", "content": "hello"}]
    answer = (await router.post(PATH, max_tokens=5, messages=begun, **OFF)).json()
    assert router.prompt[-2:] == spoken("</think>hello")
    assert answer["content"] == [{"type": "text", "text": " world"}]


async def test_claude_names_are_served_and_others_are_not(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    assert (await router.post(PATH, model="claude-sonnet-9", max_tokens=5)).json()[
        "model"
    ] == "claude-sonnet-9"
    response = await router.post(PATH, model="gpt-9", max_tokens=5)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


async def test_more_tokens_than_there_is_room_for_are_lowered(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    assert (await router.post(PATH, max_tokens=10**9)).status_code == 200
    sampling = router.cluster.decode_jobs[-1][1].sampling
    assert sampling.max_tokens == 4096 - len(router.prompt)


@pytest.mark.parametrize(
    ("choice", "mode"), [({"type": "any"}, "any"), ({"type": "tool", "name": "f"}, "tool")]
)
async def test_forced_calls_work_with_thinking_too(router: Bench, choice: dict[str, Any], mode: str) -> None:
    router.cluster.script.ids = spoken("r</think>\n\n", CALL)
    answer = (await router.post(PATH, max_tokens=900, tools=[TOOL], tool_choice=choice)).json()
    assert [part["type"] for part in answer["content"]] == ["thinking", "tool_use"]
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert takes(real_vocabulary(), grammar, "\n\n" + CALL)
    bad = await router.post(PATH, max_tokens=9, tools=[TOOL], tool_choice={"type": "tool", "name": "g"})
    assert bad.status_code == 400


async def test_formats_are_told_and_enforced(router: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    router.cluster.script.ids = spoken('</think>{"a": 1}')
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert (await router.post(PATH, max_tokens=900, **fields)).status_code == 200
        grammar = router.cluster.decode_jobs[-1][1].grammar
        assert grammar is not None
        assert takes(real_vocabulary(), grammar, '{"a": 1}')
        assert "## Response Format:" in real_tokenizer().vocabulary.text_of(router.prompt)


async def test_errors_have_anthropics_body(router: Bench) -> None:
    response = await router.post(PATH, max_tokens=0)
    body = response.json()
    assert response.status_code == 400
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"] == response.headers["x-request-id"]
    router.cluster.script.prefill_errors = [Overloaded("full", retry_after_s=2.0)]
    response = await router.post(PATH, max_tokens=5)
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert (await router.http.get("/anthropic/nothing")).json()["type"] == "error"


async def test_a_text_where_arguments_should_be_is_not_lost(router: Bench) -> None:
    broken = block(
        dsml('<D invoke name="f">\n') + parameter("p", "two", string="false") + dsml("</D invoke>")
    )
    router.cluster.script.ids = spoken("</think>", broken)
    answer = (await router.post(PATH, max_tokens=900, tools=[TOOL])).json()
    assert answer["content"][-1]["input"] == {"arguments": '{"p": two}'}


async def test_a_receipt_comes_with_the_last_event(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    events = sse((await router.post(PATH, max_tokens=50, stream=True, receipt=True)).text)
    assert [event["type"] for event in events if "epdserve" in event] == ["message_delta"]
