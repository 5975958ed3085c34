"""Raw completions: prompts of all kinds, echo, text in the middle, log-probabilities, stop strings, usage."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.conformance import BAR, Bench, bench, chunks_of, spoken
from support.grammars import real_vocabulary, takes
from support.real_tokenizer import real_tokenizer

PATH = "/v1/completions"
FIM = [real_tokenizer().marker_id(f"<{BAR}fim\u2581{part}{BAR}>") for part in ("begin", "hole", "end")]


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        one.cluster.script.ids = spoken("one two</think> three")
        yield one


def text_of(body: str, choice: int = 0) -> str:
    """Text of one choice of a stream."""
    pieces = [c["text"] for chunk in chunks_of(body) for c in chunk["choices"] if c["index"] == choice]
    return "".join(pieces)


async def test_a_raw_answer_shows_markers_and_no_end(router: Bench) -> None:
    answer = (await router.post(PATH, prompt="Once", max_tokens=99)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two</think> three", "stop")
    assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("text_completion", 1)
    assert (
        text_of((await router.post(PATH, prompt="Once", max_tokens=99, stream=True)).text) == choice["text"]
    )


async def test_sixteen_tokens_are_the_default(router: Bench) -> None:
    await router.post(PATH, prompt="x")
    assert router.cluster.decode_jobs[-1][1].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("Hello", [[19923]]),
        ([19923, 7], [[19923, 7]]),
        (["Hello", "Hello<think>"], [[19923], [19923, 128821]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_prompts_come_in_four_forms(router: Bench, prompt: Any, ids: list[list[int]]) -> None:
    answer = (await router.post(PATH, prompt=prompt, max_tokens=99)).json()
    asked = [job.tokens.tolist() for _, job in router.cluster.prefill_jobs]
    assert sorted(asked) == sorted(ids)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


async def test_choices_of_several_prompts_are_numbered_through(router: Bench) -> None:
    body = {"prompt": ["Hello", "Bye"], "n": 2, "max_tokens": 99}
    whole = (await router.post(PATH, **body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert len(router.cluster.prefill_jobs) == 2
    streamed = (await router.post(PATH, stream=True, **body)).text
    assert [text_of(streamed, n) for n in range(4)] == [choice["text"] for choice in whole["choices"]]


async def test_a_suffix_makes_it_text_in_the_middle(router: Bench) -> None:
    begin, hole, end = FIM
    await router.post(PATH, prompt="def f(", suffix="return</think>", max_tokens=9)
    ids = real_tokenizer().plain_ids
    assert router.prompt == [begin, *ids("def f("), hole, *ids("return</think>"), end]
    assert (await router.post(PATH, prompt=[1], suffix="x")).status_code == 400
    assert (await router.post(PATH, prompt="x", suffix="x", echo=True)).status_code == 400


async def test_echo_repeats_the_prompt_with_what_is_told_of_it(router: Bench) -> None:
    router.cluster.script.ids = spoken(" three")
    answer = (await router.post(PATH, prompt="One two", echo=True, logprobs=2, max_tokens=9)).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "One two three"
    told = choice["logprobs"]
    assert told["tokens"] == ["One", " two", " three"]
    assert told["token_logprobs"] == [None, -0.25, -0.5]
    assert told["text_offset"] == [0, 3, 7]
    assert [None if top is None else len(top) for top in told["top_logprobs"]] == [None, 3, 2]
    job = router.cluster.prefill_jobs[-1][1]
    assert (job.exact, job.prompt_logprobs) == (True, 2)
    streamed = (await router.post(PATH, prompt="One two", echo=True, logprobs=2, stream=True)).text
    assert text_of(streamed) == "One two three"


async def test_echo_alone_costs_no_token(router: Bench) -> None:
    answer = (await router.post(PATH, prompt="One two", echo=True, max_tokens=0, logprobs=0)).json()
    assert answer["choices"][0]["text"] == "One two"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert (await router.post(PATH, prompt="x", max_tokens=0)).status_code == 400


async def test_log_probabilities_are_parallel_lists(router: Bench) -> None:
    (choice,) = (await router.post(PATH, prompt="x", logprobs=1, max_tokens=99)).json()["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert told["text_offset"] == [0, 3, 7, 15]
    assert set(told["token_logprobs"]) == {-0.5}
    assert [len(top) for top in told["top_logprobs"]] == [1] * 4


async def test_stop_strings_end_the_text(router: Bench) -> None:
    for stream in (False, True):
        response = await router.post(PATH, prompt="x", stop="two<", stream=stream, max_tokens=99)
        text = text_of(response.text) if stream else response.json()["choices"][0]["text"]
        assert text == "one "


async def test_deepseeks_path_has_usage_in_its_last_chunk(router: Bench) -> None:
    for path, last_choices in (("/beta/completions", 1), ("/v1/completions", 0)):
        body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
        chunks = chunks_of((await router.post(path, **body)).text)
        assert chunks[-1]["usage"]["prompt_tokens"] == 1
        assert len(chunks[-1]["choices"]) == last_choices
        assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_format_is_enforced_from_the_first_token(router: Bench) -> None:
    await router.post(PATH, prompt="x", structured_outputs={"choice": ["yes", "no"]})
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert grammar.after_token is None
    assert [takes(real_vocabulary(), grammar, text) for text in ("yes", "maybe")] == [True, False]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": "x" * 600_000}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "n"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ],
)
async def test_what_cannot_be_is_named(router: Bench, fields: dict[str, Any], param: str) -> None:
    response = await router.post(PATH, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
