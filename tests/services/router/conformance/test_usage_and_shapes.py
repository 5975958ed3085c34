"""Conformance cases 36 to 40: usage, routes, choices, messages that are refused, typed markers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.conformance import BAR, OFF, TOOL, USER, Bench, bench, chunks_of, spoken
from support.real_tokenizer import real_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"p": "a"}'}}
REPLY = {"role": "tool", "tool_call_id": "c1", "content": "done"}


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


async def test_case_36_usage_in_streams(router: Bench) -> None:
    output = spoken("r</think>END here")
    router.cluster.script.ids = output
    whole = (await router.post(stop="END")).json()["usage"]
    asked = chunks_of(
        (await router.post(stream=True, stream_options={"include_usage": True}, stop="END")).text
    )
    assert [chunk for chunk in asked if chunk["usage"] is not None] == asked[-1:]
    assert (asked[-1]["choices"], asked[-1]["usage"]) == ([], whole)
    silent = chunks_of((await router.post(stream=True, stop="END")).text)
    assert all("usage" not in chunk for chunk in silent)
    # Every sampled id up to the stop string counts; without one, EOS counts as well
    assert whole["completion_tokens"] == len(spoken("r</think>END"))
    assert (await router.post()).json()["usage"]["completion_tokens"] == len(output) + 1
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in chunks_of((await router.post(stream=True, stream_options=options)).text)
        if chunk["usage"] is not None
    ]
    assert counts == sorted(counts)
    assert counts[-1] == len(output) + 1


async def test_case_37_a_cached_prompt_on_every_route(router: Bench) -> None:
    script = router.cluster.script
    script.ids, script.cached_tokens = spoken("r</think>x"), 16
    chat = (await router.post()).json()["usage"]
    assert chat["prompt_cache_hit_tokens"] + chat["prompt_cache_miss_tokens"] == chat["prompt_tokens"]
    messages = (await router.post("/v1/messages", max_tokens=50)).json()["usage"]
    assert messages["input_tokens"] == chat["prompt_cache_miss_tokens"]
    assert messages["cache_read_input_tokens"] == 16
    responses = (await router.post("/v1/responses", input="x")).json()["usage"]
    assert (responses["input_tokens"], responses["input_tokens_details"]["cached_tokens"]) == (
        chat["prompt_tokens"],
        16,
    )
    for path in ("/anthropic/v1/messages", "/v1/messages"):
        counted = (await router.post(path + "/count_tokens")).json()
        assert counted == {"input_tokens": chat["prompt_tokens"]}


async def test_case_38_three_choices_share_one_prefill(router: Bench) -> None:
    script = router.cluster.script
    script.ids, script.choices = spoken("r</think>first"), {1: spoken("</think>1"), 2: spoken("two</think>")}
    fields: dict[str, Any] = {"n": 3, "logprobs": True, "top_logprobs": 2}
    whole = (await router.post(**fields)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["first", "1", ""]
    assert len(router.cluster.prefill_jobs) == 1
    assert whole["usage"]["prompt_tokens"] == len(router.prompt)
    sampled = sum(map(len, (script.ids, *script.choices.values()))) + 3
    assert whole["usage"]["completion_tokens"] == sampled
    chunks = chunks_of((await router.post(stream=True, **fields)).text)
    texts, reasons = {0: "", 1: "", 2: ""}, {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in reasons
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"] is not None:
            reasons[choice["index"]] = choice["finish_reason"]
        if choice["delta"].get("content"):
            entries = choice["logprobs"]["content"]
            assert "".join(entry["token"] for entry in entries) == choice["delta"]["content"]
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert texts == {0: "first", 1: "1", 2: ""}
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    seeds = [job.sampling.seed for _, job in router.cluster.decode_jobs[:3]]
    assert len(set(seeds)) == 3
    assert router.cluster.open_leases == set()
    async with bench(strict_official=True) as strict:
        assert (await strict.post(n=3)).status_code == 400


async def test_case_39_messages_with_calls(router: Bench) -> None:
    router.cluster.script.ids = spoken("</think>x")
    prompts = []
    for content in ({"content": None}, {"content": ""}, {}):
        messages = [*USER, {"role": "assistant", "tool_calls": [CALL], **content}, REPLY]
        assert (await router.post(messages=messages, tools=[TOOL])).status_code == 200
        prompts.append(router.prompt)
    assert prompts[0] == prompts[1] == prompts[2]
    refused = {
        "content or tool_calls must be set": [*USER, {"role": "assistant"}],
        "must be followed by tool messages": [*USER, {"role": "assistant", "tool_calls": [CALL]}],
        "must be a response to a preceding message": [*USER, REPLY],
    }
    for words, messages in refused.items():
        response = await router.post(messages=messages, tools=[TOOL])
        assert response.status_code == 400
        error = response.json()["error"]
        assert words in error["message"]
        assert error["type"] == error["code"] == "invalid_request_error"
    assert (len(router.cluster.prefill_jobs), router.cluster.open_leases) == (3, set())


MARKERS = [f"<{BAR}User{BAR}>", "</think>", f"{BAR}DSML{BAR}", f"<{BAR}deepseek_image{BAR}>"]


@pytest.mark.parametrize("marker", MARKERS)
async def test_case_40_typed_markers_are_text(router: Bench, marker: str) -> None:
    router.cluster.script.ids = spoken("</think>x")
    marker_id = real_tokenizer().marker_id(marker)

    async def prompt_of(text: str, result: str) -> list[int]:
        tool_turns = [
            {"role": "assistant", "content": None, "reasoning_content": "", "tool_calls": [CALL]},
            {**REPLY, "content": result},
        ]
        messages = [{"role": "user", "content": text}, *tool_turns]
        assert (await router.post(messages=messages, tools=[TOOL])).status_code == 200
        return router.prompt

    plain = await prompt_of("", "")
    assert (await prompt_of(marker, "")).count(marker_id) == plain.count(marker_id)
    assert (await prompt_of("", marker)).count(marker_id) == plain.count(marker_id)


async def test_case_40_typed_markers_cost_what_their_characters_cost(router: Bench) -> None:
    router.cluster.script.ids = spoken("x")
    empty = (await router.post(messages=[{"role": "user", "content": ""}], **OFF)).json()["usage"]
    assert empty["prompt_tokens"] == 4
    for text, tokens in ((MARKERS[0], 5), ("</think>", 3), ("<think>", 3)):
        usage = (await router.post(messages=[{"role": "user", "content": text}], **OFF)).json()["usage"]
        assert usage["prompt_tokens"] == 4 + tokens


async def test_case_40_a_model_that_quotes_markers_in_plain_characters_is_not_cut(router: Bench) -> None:
    from support.conformance import typed

    quoted = " ".join(MARKERS)
    got = await router.run([*spoken("r</think>they are "), *typed(quoted)], tools=[TOOL])
    assert (got.reasoning, got.content) == ("r", "they are " + quoted)
