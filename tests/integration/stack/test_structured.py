"""Formats and calls that real workers are held to, through the official client's parse helpers."""

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from support.stack import Stack

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
OFF = {"thinking": {"type": "disabled"}}


class Sky(StrEnum):
    CLEAR = "clear"
    CLOUDY = "cloudy"


class Weather(BaseModel):
    """Kept short: a small random model fills what a schema leaves open."""

    sky: Sky
    windy: bool
    code: str = Field(max_length=4)


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def asked(stack: Stack, **fields: Any) -> dict[str, Any]:
    return {
        "model": stack.model,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 128,
        "extra_body": OFF,
        **fields,
    }


def test_a_chat_is_parsed_into_the_class_that_was_asked_for(client: OpenAI, stack: Stack) -> None:
    message = client.chat.completions.parse(**asked(stack), response_format=Weather).choices[0].message
    assert isinstance(message.parsed, Weather)
    with client.chat.completions.stream(**asked(stack), response_format=Weather) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.parsed == message.parsed


def test_a_response_is_parsed_into_the_class_that_was_asked_for(client: OpenAI, stack: Stack) -> None:
    response = client.responses.parse(
        model=stack.model,
        input="What is the weather in Oslo?",
        text_format=Weather,
        reasoning={"effort": "none"},
        max_output_tokens=128,
        temperature=0,
    )
    assert isinstance(response.output_parsed, Weather)


def test_any_json_is_json(client: OpenAI, stack: Stack) -> None:
    fields = asked(stack, temperature=1.0, seed=3, max_tokens=256)
    choice = client.chat.completions.create(**fields, response_format={"type": "json_object"}).choices[0]
    if choice.finish_reason == "stop":  # a random model may not come to an end
        assert isinstance(json.loads(choice.message.content or ""), dict)
    assert (choice.message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
def test_a_forced_call_fits_its_schema(client: OpenAI, stack: Stack, thinking: bool) -> None:
    fields = asked(stack, tools=[openai.pydantic_function_tool(Weather)], tool_choice="required")
    if thinking:
        # A random model never ends its reasoning by itself
        fields |= {"extra_body": {}, "logit_bias": {str(_end_of_thinking(stack)): 100}}
    choice = client.chat.completions.parse(**fields).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    assert not choice.message.content


def _end_of_thinking(stack: Stack) -> int:
    ids = stack.http.post("/tokenize", json={"prompt": "</think>"}).json()["tokens"]
    assert len(ids) == 1
    return int(ids[0])


def test_a_choice_of_texts(client: OpenAI, stack: Stack) -> None:
    body = {**OFF, "structured_outputs": {"choice": ["yes", "no"]}}
    for seed in range(3):
        fields = asked(stack, temperature=1.0, seed=seed, extra_body=body)
        assert client.chat.completions.create(**fields).choices[0].message.content in ("yes", "no")


def test_a_tool_loop(client: OpenAI, stack: Stack) -> None:
    fields = asked(stack, tools=[openai.pydantic_function_tool(Weather)])
    named: Any = {"type": "function", "function": {"name": "Weather"}}
    message = client.chat.completions.create(**fields, tool_choice=named).choices[0].message
    (call,) = message.tool_calls or ()
    turns = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "noted"}]
    answer = client.chat.completions.create(**{**fields, "messages": turns, "max_tokens": 8})
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_a_schema_that_cannot_be_enforced_is_refused(client: OpenAI, stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked(stack), response_format=form)
    assert refused.value.param == "response_format"
