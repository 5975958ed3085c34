"""The official Anthropic client against real processes."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from support.stack import Stack

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather lookup",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
GREEDY: dict[str, Any] = {"temperature": 0}
OFF: dict[str, Any] = {"type": "disabled"}


@pytest.fixture(params=["", "/anthropic"], ids=["v1", "anthropic"])
def client(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Anthropic]:
    url = stack.base_url + request.param
    with Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def asked(stack: Stack, **fields: Any) -> dict[str, Any]:
    return {"model": stack.model, "max_tokens": 16, "messages": QUESTION, "extra_body": GREEDY, **fields}


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_streamed_and_whole_messages_are_the_same(client: Anthropic, stack: Stack, thinking: str) -> None:
    switch: Any = {"type": thinking} | ({"budget_tokens": 1024} if thinking == "enabled" else {})
    whole = client.messages.create(**asked(stack, thinking=switch))
    with client.messages.stream(**asked(stack, thinking=switch)) as stream:
        streamed = stream.get_final_message()
    kinds = [block.type for block in whole.content]
    assert kinds[:1] == (["thinking"] if thinking == "enabled" else kinds[:1])
    said = [[getattr(block, block.type) for block in message.content] for message in (whole, streamed)]
    assert said[0] == said[1]
    assert (whole.stop_reason, whole.usage.output_tokens) == (
        streamed.stop_reason,
        streamed.usage.output_tokens,
    )


def test_count_tokens_is_what_a_message_takes(client: Anthropic, stack: Stack) -> None:
    counted = client.messages.count_tokens(model=stack.model, messages=QUESTION, system="Be brief.")
    usage = client.messages.create(**asked(stack, system="Be brief.")).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_tool_loop(client: Anthropic, stack: Stack) -> None:
    fields = asked(stack, tools=[TOOL], thinking=OFF, max_tokens=64)
    first = client.messages.create(**fields, tool_choice={"type": "any"})
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "get_weather"
    assert isinstance(call.input["city"], str)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(**{**fields, "messages": turns})
    assert second.usage.output_tokens > 0


def test_stop_sequences_are_named(client: Anthropic, stack: Stack) -> None:
    said = client.messages.create(**asked(stack, thinking=OFF)).content[0]
    assert said.type == "text"
    stop = said.text[3:5]
    cut = client.messages.create(**asked(stack, thinking=OFF, stop_sequences=[stop]))
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


def test_errors_have_their_class(client: Anthropic, stack: Stack) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(**asked(stack, model="gpt-nothing"))
    assert stack.model in str(unknown.value)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked(stack, extra_body={"temperature": 7}))


async def test_the_async_client_streams(stack: Stack) -> None:
    async with AsyncAnthropic(base_url=stack.base_url, api_key="unused", max_retries=0, timeout=60) as client:
        async with client.messages.stream(**asked(stack, model="claude-anything")) as stream:
            events = [event.type async for event in stream]
        whole = await client.messages.create(**asked(stack))
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert whole.stop_reason in ("max_tokens", "end_turn")
