"""Conformance cases 41 to 47, beyond the forty; and that every case has a test."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.errors import WorkerLost
from support.conformance import OFF, Bench, bench, chunks_of, spoken
from support.fake_cluster import Script
from support.grammars import real_vocabulary, takes

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


def test_every_case_has_a_test() -> None:
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert sorted({int(number) for number in re.findall(r"def test_case_(\d\d)_", text)}) == list(
        range(1, 48)
    )


async def test_case_41_a_slow_first_token_is_bridged_by_comments() -> None:
    script = Script(spoken("</think>x"), first_gap_s=0.12)
    async with bench(script, keep_alive_s=0.03) as router:
        text = (await router.post(stream=True)).text
    assert text.startswith(": keep-alive\n: keep-alive\n")
    assert not re.search(r"^:.*\n\n", text, flags=re.MULTILINE)  # no comment is an event of its own
    assert len(chunks_of(text)) >= 3


@pytest.mark.parametrize("stream", [True, False])
async def test_case_42_an_engine_that_stalls_or_dies_in_mid_stream(stream: bool) -> None:
    settings: dict[str, Any] = {"decode_stall_s": 0.05, "max_resumes": 0, "replacement_wait_s": 0.0}
    async with bench(Script(spoken("one two three four"), gap_s=0.2), **settings) as router:
        response = await router.post(stream=stream, **OFF)
    if not stream:
        assert response.status_code == 503
        return
    *before, last = chunks_of(response.text)
    assert last["error"]["type"] == "server_error"
    assert all("error" not in chunk for chunk in before)
    assert before[0]["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_case_42_other_protocols_say_it_in_their_own_event(path: str) -> None:
    script = Script(spoken("one two three four"), die_after=2)
    async with bench(script, max_resumes=0, replacement_wait_s=0.0) as router:
        text = (await router.post(path, stream=True, input="x", prompt="x", max_tokens=50)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if path == "/v1/completions":
        assert events[-1]["error"]["code"] == "service_unavailable"
        assert text.endswith("data: [DONE]\n\n")
        return
    assert "[DONE]" not in text
    if path == "/v1/messages":
        assert events[-1]["error"]["type"] == "overloaded_error"
        assert text.rpartition("event: ")[2].startswith("error\n")
    else:
        assert events[-1]["response"]["error"]["code"] == "service_unavailable"
        assert events[-1]["type"] == "response.failed"


async def test_case_42_a_failure_before_the_first_token_keeps_its_status() -> None:
    script = Script(spoken("x"), decode_errors=[WorkerLost("gone", worker="d0")])
    async with bench(script, replacement_wait_s=0.0) as router:
        assert (await router.post(stream=True)).status_code == 503


async def test_case_43_the_end_of_thinking_and_json_in_one_accepted_run(router: Bench) -> None:
    got = await router.run(spoken('r</think>{"a":', " 3}"), response_format=FORM)
    assert (got.reasoning, json.loads(got.content)) == ("r", {"a": 3})


async def test_case_44_an_empty_answer_is_counted(router: Bench) -> None:
    got = await router.run(spoken("only thoughts</think>"), reasoning_effort="max", tool_choice="auto")
    assert (got.content, got.calls, got.finish) == ("", [], "stop")
    assert await router.metric("epdserve_router_empty_answers_total") == 6


@pytest.mark.parametrize("role", ["user", "tool", "system"])
async def test_case_45_images_are_refused_by_a_deployment_of_text(router: Bench, role: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    content = [{"type": "text", "text": "what?"}, IMAGE]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    if role == "tool":
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": content},
        ]
    else:
        messages.append({"role": role, "content": content})
    response = await router.post(messages=messages)
    assert response.status_code == 400
    assert "image" in response.json()["error"]["message"]
    assert router.cluster.prefill_jobs == []


async def test_case_46_no_image_of_any_size_reaches_an_engine_that_cannot_count_it(router: Bench) -> None:
    # A deployment of text refuses them all, so front end and worker cannot differ about a span
    for part in (IMAGE, {"type": "image_url", "image_url": {"url": "http://example.com/1x7.png"}}):
        response = await router.post(messages=[{"role": "user", "content": [part]}])
        assert response.status_code == 400
    typed = await router.post(
        "/v1/messages",
        max_tokens=5,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
                ],
            }
        ],
    )
    assert typed.status_code == 400
    assert typed.json()["error"]["type"] == "invalid_request_error"


async def test_case_47_json_schema_is_enforced_and_a_bad_schema_refused(router: Bench) -> None:
    got = await router.run(spoken('r</think>{"a": 1}'), response_format=FORM)
    assert got.content == '{"a": 1}'
    grammar = router.cluster.decode_jobs[-1][1].grammar
    assert grammar is not None
    assert not takes(real_vocabulary(), grammar, '{"b": 1}')
    bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}}
    response = await router.post(response_format=bad)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format"
