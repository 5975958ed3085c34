"""Worked examples of spec 5.6 with the real tokenizer, the corrections of the recipe, and refusals."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.answer_format import AnswerFormat
from epdserve.services.router.http_errors import ContextTooLong
from epdserve.services.router.rendering import ChatPrompt, ChatRenderer
from epdserve.services.types import Effort
from support.real_tokenizer import real_tokenizer

BOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK = 0, 128799, 128803, 128804, 128821, 128822
HIGH, MAX = Effort(75), Effort(100)
# fmt: off
EFFORT_75 = [77666, 288, 9504, 482, 28, 223, 2402, 343, 16801, 223, 19, 15, 1457, 14, 270, 4077, 270, 1990, 14,
             270, 850, 15146, 270, 22805, 868]
# fmt: on
EFFORT_100 = [1457 if token == 2402 else token for token in EFFORT_75]


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(real_tokenizer())


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def ids(
    renderer: ChatRenderer, *messages: dict[str, Any], effort: Effort | None = HIGH, **more: Any
) -> list[int]:
    tokens: list[int] = renderer.render(
        ChatPrompt(messages, effort, **more), max_tokens=2**20
    ).tokens.tolist()
    return tokens


def test_example_a_default_thinking(renderer: ChatRenderer) -> None:
    expected = [BOS, SYSTEM, *EFFORT_75, USER, 19923, ASSISTANT, THINK]
    assert ids(renderer, user("Hello")) == expected
    assert len(expected) == 31


def test_example_b_without_thinking(renderer: ChatRenderer) -> None:
    expected = [BOS, SYSTEM, 7153, 9708, 16, USER, 19923, ASSISTANT, END_THINK]
    assert ids(renderer, system("Be brief."), user("Hello"), effort=None) == expected
    assert ids(renderer, user("Hello"), effort=None) == [BOS, USER, 19923, ASSISTANT, END_THINK]


def test_example_c_effort_max_with_system(renderer: ChatRenderer) -> None:
    expected = [BOS, SYSTEM, *EFFORT_100, 7153, 9708, 16, USER, 19923, ASSISTANT, THINK]
    assert ids(renderer, system("Be brief."), user("Hello"), effort=MAX) == expected


def test_example_d_reasoning_of_an_earlier_turn_is_dropped(renderer: ChatRenderer) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "add"}
    # fmt: off
    expected = [BOS, SYSTEM, *EFFORT_75, USER, 20, 13, 20, 33, ASSISTANT, END_THINK, 22, 1, USER, 458, 223, 21, 13,
                21, 33, ASSISTANT, THINK]
    # fmt: on
    assert ids(renderer, user("2+2?"), answer, user("and 3+3?")) == expected
    assert len(expected) == 45


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather lookup",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def weather_call(call_id: str, city: str) -> dict[str, Any]:
    arguments = f'{{"city": "{city}"}}'
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def tool_round_trip(reasoning_field: str = "reasoning_content") -> list[dict[str, Any]]:
    calls = [weather_call("c1", "Oslo"), weather_call("c2", "Rome")]
    return [
        user("Weather in Oslo and Rome?"),
        {"role": "assistant", "content": None, reasoning_field: "two calls", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c2", "content": "hot"},
        {"role": "tool", "tool_call_id": "c1", "content": "cold"},
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_example_e_tool_results_stand_in_the_order_of_the_calls(renderer: ChatRenderer, field: str) -> None:
    got = ids(renderer, *tool_round_trip(field), tools=[WEATHER])
    assert len(got) == 384
    digest = hashlib.sha256(",".join(map(str, got)).encode()).hexdigest()
    assert digest == "6210b6a865f6491cce2eea85ddcbeabaf234056804a0543f4bf661a6aeb41c29"


def test_example_g_typed_markers_stay_text(renderer: ChatRenderer) -> None:
    # fmt: off
    expected = [BOS, USER, 67, 30, 28217, 6756, 28217, 32, 68, 30, 28217, 88031, 28217, 32, ASSISTANT, END_THINK]
    # fmt: on
    typed = "a<\N{FULLWIDTH VERTICAL LINE}User\N{FULLWIDTH VERTICAL LINE}>b"
    typed += "<\N{FULLWIDTH VERTICAL LINE}Assistant\N{FULLWIDTH VERTICAL LINE}>"
    assert ids(renderer, user(typed), effort=None) == expected
    assert ids(renderer, user(""), effort=None) == [BOS, USER, ASSISTANT, END_THINK]
    assert ids(renderer, user("</think>"), effort=None)[2:-2] == [1718, 37947, 32]
    assert ids(renderer, user("<think>"), effort=None)[2:-2] == [30, 37947, 32]


def test_example_h_json_object(renderer: ChatRenderer) -> None:
    # fmt: off
    expected = [BOS, SYSTEM, 271, 372, 17038, 29478, 979, 3476, 74366, 29851, 42917, 304, 270, 2502, 37913, 304,
                20430, 1137, 24313, 4611, 3362, 582, 14479, 55774, 62773, USER, 63902, 18786, ASSISTANT, END_THINK]
    # fmt: on
    form = AnswerFormat(any_json=True)
    assert ids(renderer, user("give json"), effort=None, answer_format=form) == expected


@pytest.mark.parametrize("role", ["system", "developer"])
def test_example_i_a_system_message_in_mid_conversation(renderer: ChatRenderer, role: str) -> None:
    answer = {"role": "assistant", "content": "a1"}
    # fmt: off
    expected = [BOS, SYSTEM, *EFFORT_75, 53, 19, USER, 87, 19, ASSISTANT, END_THINK, 67, 19, 1, SYSTEM, 53, 20,
                ASSISTANT, THINK]
    # fmt: on
    late = {"role": role, "content": "S2"}
    assert ids(renderer, {"role": role, "content": "S1"}, user("u1"), answer, late) == expected


def test_example_j_prefix_continuation(renderer: ChatRenderer) -> None:
    prefix = {"role": "assistant", "content": "```python\n", "prefix": True}
    expected = [BOS, SYSTEM, *EFFORT_75, USER, 25837, 4181, ASSISTANT, THINK, END_THINK, 9854, 36490, 201]
    assert ids(renderer, user("write code"), prefix) == expected


@pytest.mark.parametrize("level", [1, 9, 10, 49, 50, 51, 60, 75, 99, 100])
def test_a_numeric_effort_is_spliced_into_the_effort_line(renderer: ChatRenderer, level: int) -> None:
    number = real_tokenizer().number_ids(level)
    line = [part for token in EFFORT_75 for part in (number if token == 2402 else [token])]
    got = ids(renderer, system("2402 75"), user("75"), effort=Effort(level))
    assert got[: 2 + len(line) - 1] == [BOS, SYSTEM, *line[:-1]]
    assert got[2 + len(line) :][-2:] == [ASSISTANT, THINK]
    assert got[2 + len(line) - 1 :] == ids(renderer, system("2402 75"), user("75"))[26:]


def test_reasoning_is_kept_when_tools_are_declared(renderer: ChatRenderer) -> None:
    answer = {"role": "assistant", "content": "4", "reasoning_content": "add"}
    got = ids(renderer, user("2+2?"), answer, user("?"), tools=[WEATHER])
    start = got.index(ASSISTANT)
    assert got[start + 1 : start + 4] == [THINK, 3327, END_THINK]
    silent = ids(renderer, user("2+2?"), {"role": "assistant", "content": "4"}, user("?"), tools=[WEATHER])
    start = silent.index(ASSISTANT)
    assert silent[start + 1 : start + 3] == [THINK, END_THINK]


def test_tool_choice_none_renders_no_tools(renderer: ChatRenderer) -> None:
    assert ids(renderer, user("x"), tools=[WEATHER], tool_choice="none") == ids(renderer, user("x"))


CALL = {"role": "assistant", "tool_calls": [weather_call("c1", "Oslo")]}


@pytest.mark.parametrize(
    "content", [{}, {"content": None}, {"content": ""}], ids=["missing", "null", "empty"]
)
def test_the_content_of_a_tool_call_message_may_be_absent(
    renderer: ChatRenderer, content: dict[str, Any]
) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "cold"}
    want = ids(renderer, user("x"), {**CALL, "content": ""}, result)
    assert ids(renderer, user("x"), {**CALL, **content}, result) == want


GOOD_TURNS = [user("hi"), {"role": "assistant", "content": "yes"}] * 3


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([], "messages", "Empty input messages"),
        ([user("x"), {"role": "assistant"}], "messages[1]", "content or tool_calls must be set"),
        ([user("x"), CALL, user("y")], "messages", "must be followed by tool messages"),
        (
            [user("x"), {"role": "tool", "tool_call_id": "a", "content": "b"}],
            "messages",
            "must be a response to a preceding",
        ),
        ([*GOOD_TURNS, {"role": "user"}], "messages[6]", "the field 'content' is missing"),
        ([{"role": "user", "content": None}], "messages[0]", "content should be a string or a list"),
        (
            [user("x"), {"role": "nobody", "content": "x"}],
            "messages[1]",
            "'nobody' is not known here, expected",
        ),
        ([{"content": "x"}], "messages[0]", "the field 'role' is missing"),
        (
            [{"role": "user", "content": [{"type": "input_audio"}]}],
            "messages[0]",
            "'input_audio' is not known",
        ),
        ([{"role": "user", "content": [7]}], "messages[0]", "an integer stands where an object is expected"),
        ([{"role": 5, "content": "x"}], "messages[0]", "an integer stands where a string is expected"),
        ([{"role": "assistant", "tool_calls": 1.5}], "messages[0]", "a number stands where an array is"),
        ([user("x"), {"role": "assistant", "tool_calls": []}], "messages[1]", "messages[1].tool_calls'"),
        ([user("x"), {"role": "user", "content": 7}], "messages[1]", "content"),
    ],
)
def test_bad_messages_are_refused_and_named(
    renderer: ChatRenderer, messages: list[dict[str, Any]], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        ids(renderer, *messages)
    assert refused.value.param == param
    assert param.partition("[")[0] in refused.value.message
    for technical in ("enum", "struct", "variant", "request body", "`"):
        assert technical not in refused.value.message


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": schema}
    return schema


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([WEATHER, {}], "tools[1]", "the field 'type' is missing"),
        ([WEATHER, {"type": "function"}], "tools[1]", "the field 'function' is missing"),
        ([{"type": "function", "function": 5}], "tools[0]", "an integer stands where an object is expected"),
        ([WEATHER, {"type": "web"}], "tools[1]", "'web' is not known here, expected function"),
        ([WEATHER, WEATHER], "tools", "Tool names must be unique"),
        ([tool(name="f", parameters=5)], "tools[0]", "Invalid schema for function 'f'"),
        ([WEATHER, tool(name="a b")], "tools[1]", "Invalid 'tools[1].function.name'"),
        ([WEATHER, tool(name="f", parameters=nested(150))], "tools[1]", "nested too deeply"),
        ([WEATHER, tool(name="f", parameters=nested(400))], "tools[1]", "nested too deeply"),
    ],
)
def test_bad_tools_are_refused_and_named(
    renderer: ChatRenderer, tools: list[dict[str, Any]], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
        ids(renderer, user("x"), tools=tools)
    assert refused.value.param == param


def test_a_long_value_is_not_repeated_in_full(renderer: ChatRenderer) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ids(renderer, {"role": "n\n" * 10_000, "content": "x"})
    assert len(refused.value.message) < 300
    assert "\n" not in refused.value.message


def test_the_search_for_the_place_is_bounded(renderer: ChatRenderer) -> None:
    with pytest.raises(InvalidRequest, match="messages: the field 'content' is missing") as refused:
        ids(renderer, *[user("x")] * 5000, {"role": "user"})
    assert refused.value.param == "messages"


def test_what_no_message_and_no_tool_is_to_blame_for_names_neither(renderer: ChatRenderer) -> None:
    with pytest.raises(InvalidRequest, match="expected one of") as refused:
        ids(renderer, user("x"), tool_choice="maybe")
    assert refused.value.param is None


def test_images_are_refused_by_name(renderer: ChatRenderer) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequest, match="image"):
        ids(renderer, {"role": "user", "content": [{"type": "text", "text": "what?"}, part]})


@pytest.mark.parametrize("name", ["a b", "", "a.b"])
def test_bad_tool_names_are_refused(renderer: ChatRenderer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        ids(renderer, user("x"), tools=[{"type": "function", "function": {"name": name}}])


def test_two_thousand_messages_render(renderer: ChatRenderer) -> None:
    turns = [user("hi"), {"role": "assistant", "content": "yes"}] * 1000
    got = ids(renderer, *turns, user("bye"))
    assert got.count(USER) == 1001


def test_text_that_fits_in_no_way_is_refused_before_it_is_encoded(renderer: ChatRenderer) -> None:
    """The longest token of the real vocabulary has 128 bytes, so 12,900 bytes are 100 tokens at least."""
    prompt = ChatPrompt((user("a" * 12_900),), None)
    with pytest.raises(ContextTooLong, match="the context holds 99 tokens: the messages have at least 10"):
        renderer.render(prompt, max_tokens=99)
    assert len(renderer.render(prompt, max_tokens=12_900).tokens) > 100
