"""The rest of OpenAI's surface on real processes: responses, raw completions, choices, log-probabilities, biases."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from support.stack import Stack

OFF = {"thinking": {"type": "disabled"}}
PLAIN: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": OFF}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_responses_streamed_and_whole(client: OpenAI, stack: Stack) -> None:
    fields: dict[str, Any] = {"model": stack.model, "input": "hi", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**fields, reasoning={"effort": "none"})
    events = list(client.responses.create(**fields, reasoning={"effort": "none"}, stream=True))
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens <= 8
    thinking = client.responses.create(**fields)
    assert thinking.output[0].type == "reasoning"


def test_raw_completions_go_on_where_the_prompt_ends(client: OpenAI, stack: Stack) -> None:
    fields: dict[str, Any] = {"model": stack.model, "temperature": 0}
    one = client.completions.create(**fields, prompt="Once upon a time", max_tokens=6).choices[0].text
    both = client.completions.create(**fields, prompt=["Once upon a time", "Then"], max_tokens=6)
    assert both.choices[0].text == one
    echoed = client.completions.create(
        **fields, prompt="Once upon a time", max_tokens=6, echo=True, logprobs=2
    )
    assert echoed.choices[0].text == "Once upon a time" + one
    told = echoed.choices[0].logprobs
    assert told is not None
    assert "".join(told.tokens or ()) == echoed.choices[0].text
    assert (told.token_logprobs or ())[0] is None
    assert all(logprob <= 0 for logprob in (told.token_logprobs or ())[1:])
    streamed = client.completions.create(**fields, prompt="Once upon a time", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one


def test_choices_are_those_of_single_requests(client: OpenAI, stack: Stack) -> None:
    fields: dict[str, Any] = {**PLAIN, "temperature": 1.0}
    three = client.chat.completions.create(model=stack.model, messages=QUESTION, n=3, seed=7, **fields)
    texts = [choice.message.content for choice in three.choices]
    alone = [
        client.chat.completions.create(model=stack.model, messages=QUESTION, seed=7 + index, **fields)
        .choices[0]
        .message.content
        for index in range(3)
    ]
    assert texts == alone
    assert len(set(texts)) > 1


def test_log_probabilities_of_greedy_tokens_are_the_greatest(client: OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=QUESTION, logprobs=True, top_logprobs=3, **PLAIN
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert "".join(entry.token for entry in told.content or ()) == answer.choices[0].message.content
    for entry in told.content or ():
        assert entry.token == entry.top_logprobs[0].token
        assert [one.logprob for one in entry.top_logprobs] == sorted(
            (one.logprob for one in entry.top_logprobs), reverse=True
        )


def test_a_bias_forbids_a_token(client: OpenAI, stack: Stack) -> None:
    fields: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "logprobs": True, **PLAIN}
    told = client.chat.completions.create(**fields).choices[0].logprobs
    assert told is not None
    first = (told.content or ())[0].token
    (token,) = stack.http.post("/tokenize", json={"prompt": first}).json()["tokens"]
    other = client.chat.completions.create(**fields, logit_bias={str(token): -100}).choices[0].logprobs
    assert other is not None
    assert first not in [entry.token for entry in other.content or ()]


def test_log_probabilities_of_the_prompt_come_with_an_exact_run(client: OpenAI, stack: Stack) -> None:
    extra = {**OFF, "prompt_logprobs": 1, "receipt": True}
    answer = client.chat.completions.create(
        model=stack.model, messages=QUESTION, **{**PLAIN, "extra_body": extra}
    )
    told = (answer.model_extra or {})["prompt_logprobs"]
    assert answer.usage is not None
    assert len(told) == answer.usage.prompt_tokens
    assert (told[0], (answer.model_extra or {})["epdserve"]["exact"]) == (None, True)


async def test_the_async_client_gets_responses(stack: Stack) -> None:
    async with AsyncOpenAI(
        base_url=f"{stack.base_url}/v1", api_key="unused", max_retries=0, timeout=60
    ) as client:
        stream = await client.responses.create(
            model=stack.model, input="hi", max_output_tokens=4, stream=True
        )
        kinds = [event.type async for event in stream]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
