"""The official OpenAI client chats with real processes."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from support.stack import Stack

QUESTION = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def greedy(stack: Stack, **fields: Any) -> dict[str, Any]:
    return {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}


def collect(chunks: Any) -> tuple[str, str, str | None]:
    """Reasoning, content and finish reason of streamed chunks."""
    reasoning, content, finish = [], [], None
    for chunk in chunks:
        for choice in chunk.choices:
            reasoning.append(getattr(choice.delta, "reasoning_content", None) or "")
            content.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return "".join(reasoning), "".join(content), finish


def test_models_lists_what_can_be_asked(client: OpenAI, stack: Stack) -> None:
    assert stack.model in [model.id for model in client.models.list()]


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_streamed_and_whole_answers_are_the_same(client: OpenAI, stack: Stack, thinking: str) -> None:
    extra = {"thinking": {"type": thinking}}
    whole = client.chat.completions.create(**greedy(stack), extra_body=extra)
    streamed = client.chat.completions.create(**greedy(stack), stream=True, extra_body=extra)
    message = whole.choices[0].message
    reasoning = getattr(message, "reasoning_content", None) or ""
    assert collect(streamed) == (reasoning, message.content or "", whole.choices[0].finish_reason)
    assert reasoning or message.content


def test_usage_adds_up_and_comes_last(client: OpenAI, stack: Stack) -> None:
    chunks = list(
        client.chat.completions.create(**greedy(stack), stream=True, stream_options={"include_usage": True})
    )
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert usage.completion_tokens <= 24
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_second_asking_hits_the_cache(client: OpenAI, stack: Stack) -> None:
    body = greedy(stack, messages=[{"role": "user", "content": "Once upon a time there was a river. " * 40}])
    first = client.chat.completions.create(**body)
    second = client.chat.completions.create(**body)
    assert first.usage is not None
    assert second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None
    assert 0 < (details.cached_tokens or 0) < second.usage.prompt_tokens
    extra = second.usage.model_extra or {}
    assert extra["prompt_cache_hit_tokens"] == details.cached_tokens
    assert extra["prompt_cache_hit_tokens"] + extra["prompt_cache_miss_tokens"] == second.usage.prompt_tokens


def test_a_conversation_goes_on(client: OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(**greedy(stack)).choices[0].message
    turns = [
        *QUESTION,
        {"role": "assistant", "content": answer.content or ""},
        {"role": "user", "content": "Why?"},
    ]
    again = client.chat.completions.create(**greedy(stack, messages=turns))
    assert again.choices[0].finish_reason in ("stop", "length")


def test_a_seed_repeats_a_draw(client: OpenAI, stack: Stack) -> None:
    body = greedy(stack, temperature=1.0, top_p=0.9, seed=42)
    texts = [client.chat.completions.create(**body).choices[0].message.to_dict() for _ in range(2)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_effort_is_accepted(client: OpenAI, stack: Stack, effort: str) -> None:
    body = greedy(stack, max_tokens=4)
    answer = client.chat.completions.create(**body, extra_body={"reasoning_effort": effort})
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_tools_can_be_declared(client: OpenAI, stack: Stack) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    answer = client.chat.completions.create(**greedy(stack, max_tokens=8), tools=[tool])
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


async def test_the_async_client_streams_many_at_once(stack: Stack) -> None:
    import asyncio

    async with AsyncOpenAI(
        base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:

        async def one(number: int) -> str:
            messages = [{"role": "user", "content": f"Tell me about the number {number}."}]
            stream = await client.chat.completions.create(**greedy(stack, messages=messages), stream=True)
            reasoning, content, finish = collect([chunk async for chunk in stream])
            assert finish in ("stop", "length")
            return reasoning + content

        alone = [await one(number) for number in range(3)]
        together = await asyncio.gather(*(one(number) for number in range(3)))
    assert together == alone


async def test_the_async_client_gets_whole_answers(stack: Stack) -> None:
    async with AsyncOpenAI(
        base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        answer = await client.chat.completions.create(**greedy(stack))
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_leaving_a_stream_frees_everything(client: OpenAI, stack: Stack) -> None:
    with client.chat.completions.create(
        **greedy(stack, max_tokens=2000), stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    stack.assert_conserved(within_s=5.0)


def test_errors_have_their_class(client: OpenAI, stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**greedy(stack, model="gpt-nothing"))
    assert stack.model in unknown.value.message  # what could have been asked instead
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(**greedy(stack, temperature=7))
    assert "temperature" in hot.value.message
