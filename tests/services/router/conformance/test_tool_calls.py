"""Conformance cases 1 to 20: tool calls. The number in a test's name is the case's in the API's specification."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from epdserve.services.router.events import Message
from epdserve.services.router.parsing import OutputParser
from epdserve.services.router.rendering import ChatPrompt, ChatRenderer
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.types import Effort, FinishReason
from support.conformance import (
    BAR,
    OFF,
    TOOL,
    USER,
    Bench,
    Outcome,
    bench,
    block,
    chunks_of,
    dsml,
    invoke,
    parameter,
    spoken,
    typed,
)
from support.grammars import real_vocabulary, takes
from support.real_tokenizer import real_tokenizer, real_tokenizer_json

TOOLS = {"tools": [TOOL]}


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


async def one_call(router: Bench, *parameters: str, **fields: Any) -> Outcome:
    """What comes of an answer that is one call of ``f`` after its reasoning."""
    return await router.run(spoken("r</think>", block(invoke("f", *parameters))), **{**TOOLS, **fields})


async def test_case_01_content_before_a_call_and_no_markup_in_it(router: Bench) -> None:
    output = spoken("</think>ok\n\n", block(invoke("f", parameter("p", "a"))))
    got = await router.run(output, **TOOLS)
    assert (got.content, got.calls, got.finish) == ("ok", [("f", '{"p": "a"}')], "tool_calls")
    response = await router.post(stream=True, **TOOLS)
    for chunk in chunks_of(response.text):
        assert "DSML" not in (chunk["choices"][0]["delta"].get("content") or "")


async def test_case_02_state_belongs_to_a_request_and_a_second_turn_parses(router: Bench) -> None:
    first = await one_call(router, parameter("p", "a"))
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": first.calls[0][1]}}
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    second = await one_call(router, parameter("p", "b"), messages=turns)
    assert (first.calls, second.calls) == ([("f", '{"p": "a"}')], [("f", '{"p": "b"}')])


async def test_case_03_a_value_that_ends_like_a_tag_begins(router: Bench) -> None:
    got = await one_call(router, parameter("p", "make 2>&1"))
    assert got.arguments == [{"p": "make 2>&1"}]


async def test_case_04_long_values_come_through_byte_for_byte(router: Bench) -> None:
    code = 'if a < b: print("x", "name=", \'</\', "\\\\t\\n")\n\t# </tag> {"a": [1, "2"]}\n' * 5
    got = await one_call(router, parameter("p", code), parameter("q", "7", string="false"))
    assert got.arguments == [{"p": code, "q": 7}]


@pytest.mark.parametrize("tail", ["<", "</", f"</{BAR}", f"</{BAR}DSML", f"</{BAR}DSML{BAR} param"])
async def test_case_05_the_beginning_of_a_close_tag_is_kept(router: Bench, tail: str) -> None:
    begin, end = dsml('<D parameter name="p" string="true">'), dsml("</D parameter>\n</D invoke>\n</D calls>")
    output = [*spoken("</think>", dsml('<D calls>\n<D invoke name="f">\n') + begin), *typed("v" + tail)]
    got = await router.run([*output, *spoken(end)], **TOOLS)
    assert got.arguments == [{"p": "v" + tail}]


@pytest.mark.parametrize("name", ["arguments", "input"])
async def test_case_06_wrapped_arguments_are_unwrapped_if_that_is_on(router: Bench, name: str) -> None:
    inner = '{"p": "a", "q": 1}'
    for string in ("false", "true"):
        assert (await one_call(router, parameter(name, inner, string=string))).arguments == [
            {"p": "a", "q": 1}
        ]
    # Two parameters are no wrapper, nor is text that is no object
    both = await one_call(router, parameter(name, "{}", string="false"), parameter("p", "a"))
    assert both.arguments == [{name: {}, "p": "a"}]
    assert (await one_call(router, parameter(name, "plain"))).arguments == [{name: "plain"}]
    async with bench(unwrap_arguments=False) as strict:
        got = await one_call(strict, parameter(name, inner, string="false"))
        assert got.arguments == [{name: {"p": "a", "q": 1}}]


async def test_case_07_a_schema_that_has_such_a_property_keeps_it(router: Bench) -> None:
    parameters = {"type": "object", "properties": {"arguments": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    got = await one_call(router, parameter("arguments", '{"p": 1}', string="false"), tools=[tool])
    assert got.arguments == [{"arguments": {"p": 1}}]


async def test_case_08_a_call_without_the_opening_of_its_block(router: Bench) -> None:
    output = spoken("</think>ok\n", invoke("f", parameter("p", "a")))
    got = await router.run(output, **TOOLS)
    assert (got.content, got.arguments, got.finish) == ("ok", [{"p": "a"}], "tool_calls")


async def test_case_09_malformed_wrappers(router: Bench) -> None:
    call = invoke("f", parameter("p", "a"))
    for label in ("calls", "toolcalls", " toolcalls", "tool_calls"):
        opening, closing = f"<{BAR}DSML{BAR}{label}>\n", f"</{BAR}DSML{BAR}{label}>"
        got = await router.run(spoken("</think>", opening + call + closing), **TOOLS)
        assert (got.content, got.arguments) == ("", [{"p": "a"}]), label
    before = await router.metric("epdserve_router_empty_answers_total")
    got = await router.run(spoken("</think>", dsml("<D calls>\nnothing follows")), **TOOLS)
    assert (got.content, got.calls, got.finish) == ("", [], "stop")
    assert await router.metric("epdserve_router_empty_answers_total") == before + 6


async def test_case_10_the_type_of_a_parameter_comes_from_the_schema_if_the_tag_lacks_it(
    router: Bench,
) -> None:
    got = await one_call(
        router,
        parameter("p", "3", string=None),
        parameter("q", "3", string=None),
        parameter("other", "4", string=None),
    )
    assert got.arguments == [{"p": "3", "q": 3, "other": "4"}]


async def test_case_11_text_around_calls(router: Bench) -> None:
    calls = ("between", invoke("f", parameter("p", "a")), "and", invoke("f", parameter("p", "b")))
    got = await router.run(spoken("</think>before\n\n", block(*calls), "after"), **TOOLS)
    assert got.content == "before"
    assert got.arguments == [{"p": "a"}, {"p": "b"}]


async def test_case_12_what_is_no_json_is_passed_on_and_counted(router: Bench) -> None:
    got = await one_call(router, parameter("q", "two", string="false"))
    assert got.calls == [("f", '{"q": two}')]
    assert await router.metric("epdserve_router_invalid_calls_total") == 6


async def test_case_13_a_call_cut_by_the_limit(router: Bench) -> None:
    output = spoken("</think>", block(invoke("f", parameter("p", "a long value"))))
    cut = len(spoken("</think>", block(invoke("f", parameter("p", "a long value")))[:-60]))
    for stream in (False, True):
        got = await router.outcome(output, "token", stream=stream, max_tokens=cut, **TOOLS)
        assert got.finish == "length"
        assert got.calls[0][0] == "f"
        assert got.calls[0][1].startswith('{"p": "a')
        assert not got.calls[0][1].endswith("}")


async def test_case_14_two_calls_have_indices_and_ids_of_their_own(router: Bench) -> None:
    # Index, id, type and name once a call, arguments afterwards: asserted by the reader of streams
    calls = block(invoke("f", parameter("p", "a")), invoke("f", parameter("p", "b")))
    got = await router.run(spoken("</think>", calls), **TOOLS)
    assert got.calls == [("f", '{"p": "a"}'), ("f", '{"p": "b"}')]


async def test_case_15_a_call_without_parameters_is_an_empty_object_and_no_other_is(router: Bench) -> None:
    assert (await one_call(router)).calls == [("f", "{}")]
    ids = spoken("</think>", block(invoke("f", parameter("p", "a"))))
    for stream in (False, True):
        answers = await asyncio.gather(
            *(router.outcome(ids, "whole", stream=stream, **TOOLS) for _ in range(20))
        )
        assert {answer.calls[0][1] for answer in answers} == {'{"p": "a"}'}
    chat = ChatRenderer(real_tokenizer()).render(ChatPrompt(USER, Effort(75), [TOOL]), max_tokens=4096)
    for _ in range(1000):
        message = Message()
        parser = OutputParser(chat, real_tokenizer())
        message.add(parser.push(ids))
        message.add(parser.finish(FinishReason.STOP))
        assert message.calls[0].arguments == ['{"p": "a"}']


async def test_case_16_the_finish_reason_of_a_call_is_tool_calls(router: Bench) -> None:
    assert (await one_call(router, parameter("p", "a"))).finish == "tool_calls"


async def test_case_17_markup_of_other_generations(router: Bench) -> None:
    v4 = block(invoke("f", parameter("p", "a"))).replace(f"{BAR} calls", f"{BAR}tool_calls")
    v4 = v4.replace(f"{BAR} invoke", f"{BAR}invoke").replace(f"{BAR} parameter", f"{BAR}parameter")
    assert (await router.run(spoken("</think>", v4), **TOOLS)).arguments == [{"p": "a"}]
    got = await router.run([*spoken("</think>"), *typed(v4)], **TOOLS)
    assert (got.content, got.calls, got.finish) == (v4, [], "stop")
    older = real_tokenizer_json().replace(f"<{BAR}System{BAR}>", f"<{BAR}place{BAR}>")
    with pytest.raises(ValueError, match="System"):
        RouterTokenizer(older)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_case_18_forced_calls(router: Bench, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}
    fields = {"tools": [TOOL, other], "tool_choice": choice}
    inside = invoke("f", parameter("p", "a")) + dsml("</D calls>")
    got = await router.run(spoken(inside), **fields, **OFF)
    assert (got.content, got.calls, got.finish) == ("", [("f", '{"p": "a"}')], "tool_calls")
    assert router.prompt[-6:] == spoken(dsml("</think>\n\n<D calls>\n"))
    _check_forced(router, inside, after=None)
    thinking = "\n\n" + dsml("<D calls>\n") + inside
    got = await router.run(spoken("r</think>", thinking), **fields)
    assert (got.reasoning, got.content, got.calls) == ("r", "", [("f", '{"p": "a"}')])
    _check_forced(router, thinking, after=spoken("</think>")[0])
    async with bench(strict_official=True) as strict:
        assert (await strict.post(**fields)).status_code == 400


def _check_forced(router: Bench, text: str, *, after: int | None) -> None:
    """The worker was told a grammar that takes this call and neither free text nor a wrong type."""
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert grammar.after_token == after
    assert takes(real_vocabulary(), grammar, text)
    assert not takes(real_vocabulary(), grammar, "free text")
    wrong = text.replace('name="p" string="true">a<', 'name="q" string="false">"a"<')
    assert not takes(real_vocabulary(), grammar, wrong)


async def test_case_19_auto_leaves_a_free_answer_possible(router: Bench) -> None:
    got = await router.run(spoken("r</think>just text"), tool_choice="auto", **TOOLS)
    assert (got.content, got.calls, got.finish) == ("just text", [], "stop")
    assert router.cluster.decode_jobs[-1][1].grammar is None
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    strict["function"]["parameters"] = {  # type: ignore[index]
        "type": "object",
        "properties": {"p": {"type": "string"}},
        "required": ["p"],
        "additionalProperties": False,
    }
    got = await router.run(spoken("r</think>just text"), tools=[strict])
    assert got.content == "just text"
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert grammar.after_token == spoken(dsml("<D "))[1]  # free until the first marker


async def test_case_20_a_gateway_that_says_auto_gets_auto(router: Bench) -> None:
    got = await router.run(spoken("</think>f(p='a')"), tool_choice="auto", **TOOLS)
    assert (got.calls, got.finish) == ([], "stop")
    assert json.dumps(got.content) == "\"f(p='a')\""
