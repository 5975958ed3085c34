"""Conformance cases 21 to 30: reasoning. The number in a test's name is the case's in the API's specification."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.conformance import (
    OFF,
    TOOL,
    USER,
    Bench,
    bench,
    block,
    chunks_of,
    invoke,
    parameter,
    spoken,
    typed,
)
from support.grammars import real_vocabulary, takes

TOOLS = {"tools": [TOOL]}
THINK, END_THINK = 128821, 128822


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


async def test_case_21_reasoning_without_its_opening_marker(router: Bench) -> None:
    got = await router.run(spoken("Let me see.</think>\n\nIt is 4."))
    assert (got.reasoning, got.content) == ("Let me see.", "It is 4.")
    got = await router.run(spoken("\n\nfirst", "</think>", "x"))
    assert got.reasoning == "first"


async def test_case_22_prompt_and_parser_take_the_mode_from_one_value(router: Bench) -> None:
    got = await router.run(spoken("no marker"))
    assert router.prompt[-1] == THINK
    assert (got.reasoning, got.content) == ("no marker", "")
    got = await router.run(spoken("no marker"), **OFF)
    assert router.prompt[-1] == END_THINK
    assert (got.reasoning, got.content) == (None, "no marker")


async def test_case_23_a_stray_end_of_thinking_is_removed(router: Bench) -> None:
    got = await router.run(spoken("</think>", "the rest"), **OFF)
    assert (got.reasoning, got.content) == (None, "the rest")


async def test_case_24_content_that_explains_the_tag(router: Bench) -> None:
    got = await router.run(spoken("r</think>the tag ", "</think>", " ends it"))
    assert (got.reasoning, got.content) == ("r", "the tag  ends it")
    got = await router.run([*spoken("r</think>the tag "), *typed("</think>"), *spoken(" ends it")])
    assert (got.reasoning, got.content) == ("r", "the tag </think> ends it")


async def test_case_25_a_call_before_the_reasoning_has_ended(router: Bench) -> None:
    call = block(invoke("f", parameter("p", "a")))
    got = await router.run(spoken("think\n\n", call, "</think>"), **TOOLS)
    assert (got.reasoning, got.content, got.arguments) == ("think", "", [{"p": "a"}])
    assert got.finish == "tool_calls"


async def test_case_26_an_answer_that_ends_inside_the_reasoning(router: Bench) -> None:
    output = spoken("let me think of it")
    for stream in (False, True):
        got = await router.outcome(output, "token", stream=stream, max_tokens=3)
        assert (got.reasoning, got.content, got.finish) == ("let me think", "", "length")
    usage = (await router.post(max_tokens=3)).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 3
    got = await router.run(output)
    assert (got.reasoning, got.content, got.finish) == ("let me think of it", "", "stop")


async def test_case_27_reasoning_of_a_tool_loop_is_kept_under_both_names(router: Bench) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    async def prompt_with(**reasoning: str) -> list[int]:
        assistant = {"role": "assistant", "content": None, "tool_calls": [call], **reasoning}
        messages = [*USER, assistant, {"role": "tool", "tool_call_id": "c1", "content": "ok"}]
        await router.outcome(spoken("</think>x"), "whole", messages=messages, **TOOLS)
        return router.prompt

    named = await prompt_with(reasoning_content="because")
    assert named == await prompt_with(reasoning="because")
    thought = spoken("<think>because</think>")
    assert any(named[i : i + len(thought)] == thought for i in range(len(named)))
    empty = await prompt_with()
    assert any(empty[i : i + 2] == [THINK, END_THINK] for i in range(len(empty)))


async def test_case_28_the_answer_after_a_tool_result_is_content(router: Bench) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    got = await router.run(spoken("it is sunny</think>Sunny!"), messages=messages, **TOOLS)
    assert (got.reasoning, got.content) == ("it is sunny", "Sunny!")


@pytest.mark.parametrize(
    ("effort", "number"),
    [
        ("minimal", "50"),
        ("low", "50"),
        ("medium", "75"),
        ("high", "75"),
        ("xhigh", "75"),
        ("max", "100"),
        ("ultra", "100"),
        (60, "60"),
        (1, "1"),
        (None, "75"),
    ],
)
async def test_case_29_efforts(router: Bench, effort: Any, number: str) -> None:
    await router.outcome(spoken("</think>x"), "whole", reasoning_effort=effort)
    assert router.prompt[8] == spoken(number)[0]


async def test_case_29_no_effort_and_bogus_ones(router: Bench) -> None:
    got = await router.run(spoken("x"), reasoning_effort="none")
    assert (got.reasoning, router.prompt[-1]) == (None, END_THINK)
    for bogus in ("bogus", 0, 101, 1.5):
        assert (await router.post(reasoning_effort=bogus)).status_code == 400


async def test_case_30_the_grammar_begins_after_the_reasoning(router: Bench) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    got = await router.run(spoken('some { free text</think>{"a": 3}'), response_format=form)
    assert (got.reasoning, got.content) == ("some { free text", '{"a": 3}')
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert grammar.after_token == END_THINK
    assert takes(real_vocabulary(), grammar, '{"a": 3}')
    assert not takes(real_vocabulary(), grammar, '{"a": "3"}')
    response = await router.post(stream=True, response_format=form)
    assert len(chunks_of(response.text)) > 3
