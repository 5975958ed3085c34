"""Responses: the recipe's writer as the oracle, what it does not do, and what is ignored because nothing is kept."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import deepseek_recipe as recipe
import pytest
from epdserve.services.router.responses.items import custom_input
from hypothesis import given
from hypothesis import strategies as st
from support.conformance import Bench, bench, block, invoke, parameter, spoken
from support.grammars import real_vocabulary, takes
from support.recipe_oracle import oracle_events, sse, without_names

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "f",
    "description": "does it",
    "parameters": {"type": "object", "properties": {"p": {"type": "string"}}},
    "strict": False,
}
PATCH = {"type": "custom", "name": "apply_patch"}
SPACE = {"type": "namespace", "name": "ns", "description": "d", "tools": [{**TOOL, "name": "g"}]}
OFF = {"reasoning": {"effort": "none"}}
CALL = block(invoke("f", parameter("p", 'a "b"')))


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("think</think>hello there", {}),
    ("hello there", {**OFF, "instructions": "be brief", "temperature": 0.5, "max_output_tokens": 77}),
    ("</think>hello", {}),
    ("only thoughts", {}),
    ("think</think>ok\n\n" + CALL, {"tools": [TOOL]}),
    (block(invoke("f"), invoke("f", parameter("p", "x"))), {**OFF, "tools": [TOOL]}),
    ("</think>" + block(invoke("apply_patch", parameter("input", '*** "x"\\n\nend'))), {"tools": [PATCH]}),
    ("</think>" + block(invoke("ns::g", parameter("p", "1"))), {"tools": [TOOL, SPACE]}),
]


@pytest.mark.parametrize("length", [False, True], ids=["stop", "length"])
@pytest.mark.parametrize(("said", "fields"), ANSWERS, ids=range(len(ANSWERS)))
async def test_events_are_those_of_the_official_writer(
    router: Bench, said: str, fields: dict[str, Any], length: bool
) -> None:
    ids = spoken(said)
    script = router.cluster.script
    script.cached_tokens, script.stop_id = 4, None if length else 1
    script.ids = ids
    if length:
        fields = {**fields, "max_output_tokens": len(ids)}
    body = {"model": "demo", "input": "x", **fields}
    ours = without_names(sse((await router.post(PATH, **{**body, "messages": None}, stream=True)).text))
    usage = (len(router.prompt), 4)
    theirs = without_names(oracle_events(recipe.ResponsesRequest, body, ids, length=length, usage=usage))
    if not length:
        # EOS is a sampled token, which the recipe is not told of
        for name in ("output_tokens", "total_tokens"):
            theirs[-1]["response"]["usage"][name] += 1
    assert _comparable(ours) == _comparable(theirs)


def _comparable(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without numbers, and pieces joined: the recipe leaves out pieces that are empty for a custom tool."""
    found: list[dict[str, Any]] = []
    for event in events:
        event.pop("sequence_number")
        last = found[-1] if found else {}
        if event["type"].endswith(".delta") and event["type"] == last.get("type"):
            last["delta"] += event["delta"]
            continue
        found.append(event)
    return found


async def test_events_are_numbered(router: Bench) -> None:
    router.cluster.script.ids = spoken("think</think>ok")
    events = sse((await router.post(PATH, input="x", stream=True)).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize(("said", "fields"), ANSWERS, ids=range(len(ANSWERS)))
async def test_a_whole_response_is_the_last_event_of_a_stream(
    router: Bench, said: str, fields: dict[str, Any]
) -> None:
    router.cluster.script.ids = spoken(said)
    whole = (await router.post(PATH, input="x", **fields)).json()
    last = sse((await router.post(PATH, input="x", stream=True, **fields)).text)[-1]["response"]
    assert without_names(whole) == without_names(last)


async def test_what_needs_state_is_accepted_and_ignored(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    ignored = {
        "store": True,
        "previous_response_id": "resp_1",
        "include": ["reasoning.encrypted_content"],
        "background": True,
        "truncation": "auto",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
    }
    answer = (await router.post(PATH, input="x", **ignored)).json()
    assert (answer["store"], answer["previous_response_id"]) == (False, None)
    assert (answer["metadata"], answer["prompt_cache_key"]) == ({"a": "b"}, "k")


async def test_hosted_tools_are_left_out(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    tools = [{"type": "web_search"}, {"type": "local_shell"}]
    response = await router.post(PATH, input="x", tools=tools, tool_choice="required")
    assert response.status_code == 200, response.text
    assert router.cluster.decode_jobs[-1][1].grammar is None


async def test_a_conversation_of_items_is_that_of_the_same_chat(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    call = {"name": "f", "arguments": '{"p": "a"}'}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", **call},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    await router.post(PATH, input=items, tools=[TOOL])
    ours = router.prompt
    inner = {name: TOOL[name] for name in ("name", "description", "parameters")}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "t",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    await router.post(messages=messages, tools=[{"type": "function", "function": inner}])
    assert ours == router.prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0]"),
        ({"input": "x", "tools": [{"type": "custom", "name": "other"}]}, "tools[0]"),
        ({"input": "x", "tool_choice": "maybe"}, "tool_choice"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "x", "reasoning": {"effort": "bogus"}}, "reasoning_effort"),
        ({"input": "x", "reasoning": 5}, "reasoning"),
        ({"input": 5}, "input"),
    ],
)
async def test_what_cannot_be_is_named(router: Bench, fields: dict[str, Any], param: str | None) -> None:
    response = await router.post(PATH, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_formats_and_forced_calls_reach_the_worker(router: Bench) -> None:
    router.cluster.script.ids = spoken('</think>{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    await router.post(PATH, input="x", text={"format": form})
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert takes(real_vocabulary(), grammar, '{"a": 1}')
    router.cluster.script.ids = spoken("</think>\n\n", CALL)
    answer = (await router.post(PATH, input="x", tools=[TOOL], tool_choice="required")).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert takes(real_vocabulary(), grammar, "\n\n" + CALL)


async def test_logprobs_come_if_they_are_included(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>two words")
    fields = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = (await router.post(PATH, **fields)).json()
    (part,) = answer["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "two words"


@given(st.text(max_size=20), st.data())
def test_text_of_a_custom_tool_grows_and_never_changes(text: str, data: st.DataObject) -> None:
    import json

    whole = '{"input": ' + json.dumps(text, ensure_ascii=data.draw(st.booleans())) + "}"
    before = ""
    for end in range(len(whole) + 1):
        now = custom_input(whole[:end])
        assert now.startswith(before)
        before = now
    assert before == text
