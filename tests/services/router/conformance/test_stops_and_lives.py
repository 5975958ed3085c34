"""Conformance cases 31 to 35: stop strings, Unicode, clients that leave, caches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.router.config import RouterConfig
from support.conformance import OFF, TOOL, Bench, bench, block, chunks_of, invoke, parameter, spoken
from support.fake_cluster import FakeCluster, Script
from support.live_server import LiveRouter, eventually, live_router

LONG = "a stop string of 30 characters"


@pytest.fixture
async def router() -> AsyncIterator[Bench]:
    async with bench() as one:
        yield one


async def test_case_31_stop_strings(router: Bench) -> None:
    got = await router.run(spoken("not the END yet</think>It is EN", "D of it"), stop="END")
    assert (got.reasoning, got.content, got.finish) == ("not the END yet", "It is ", "stop")
    got = await router.run(spoken("a ", LONG[:9], LONG[9:], " b"), stop=[LONG], **OFF)
    assert got.content == "a "
    got = await router.run(spoken("a ", LONG[:-1]), stop=[LONG], **OFF)
    assert got.content == "a " + LONG[:-1]
    got = await router.run(spoken("It is END"), stop="END", include_stop_str_in_output=True, **OFF)
    assert got.content == "It is END"
    async with bench(stop_in_reasoning=True) as everywhere:
        got = await everywhere.run(spoken("not the END yet</think>x"), stop="END")
        assert (got.reasoning, got.content, got.finish) == ("not the ", "", "stop")


async def test_case_31_no_more_is_held_back_than_a_stop_string_may_need(router: Bench) -> None:
    output = spoken(LONG[:20], LONG * 2, "the end")
    router.cluster.script.ids = output
    response = await router.post(stream=True, stop=[LONG + "!"], **OFF)
    said = sent = 0
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks_of(response.text)]
    vocabulary = [len(text) for text in map(_text_of, output)]
    whole = "".join(texts)
    assert whole == LONG[:20] + LONG * 2 + "the end"
    for length in vocabulary:
        said += length
        while texts and sent + len(texts[0]) <= said:
            sent += len(texts.pop(0))
        assert said - sent <= len(LONG + "!") - 1 or not texts


def _text_of(token: int) -> str:
    from support.real_tokenizer import real_tokenizer

    return real_tokenizer().vocabulary.name_of(token)


async def test_case_32_characters_spread_over_tokens(router: Bench) -> None:
    text = "\N{PILE OF POO} \N{CJK UNIFIED IDEOGRAPH-9F98}\N{CJK UNIFIED IDEOGRAPH-4E2D}"
    assert len(spoken("\N{PILE OF POO}")) > 1
    got = await router.run(spoken("</think>", text))
    assert got.content == text
    call = block(invoke("f", parameter("p", text)))
    got = await router.run(spoken("</think>", call), tools=[TOOL])
    assert got.arguments == [{"p": text}]
    cut = spoken("ok\N{PILE OF POO}")[:-1]
    for stream in (False, True):
        got = await router.outcome(cut, "token", stream=stream, max_tokens=len(cut), **OFF)
        assert (got.content, got.finish) == ("ok", "length")


async def _ask_and_leave(
    router: LiveRouter, *, stream: bool, after_s: float, path: str, **fields: Any
) -> None:
    body = json.dumps(
        {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 900}
        | {"prompt": "x", "input": "x", "stream": stream, **fields}
    ).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", router.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", ["prefill", "transfer", "decode"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_case_33_a_client_that_leaves_is_forgotten_in_every_phase(
    phase: str, path: str, stream: bool
) -> None:
    waits = {"prefill": {"prefill_s": 60.0}, "transfer": {"first_gap_s": 60.0}, "decode": {"gap_s": 0.02}}
    cluster = FakeCluster(Script(spoken("a" * 50) * 100, **waits[phase]))  # type: ignore[arg-type]
    config = RouterConfig(model_dir=Path("unused"), model_name="demo")
    async with live_router(config, cluster) as router:
        await _ask_and_leave(router, stream=stream, after_s=0.08, path=path)
        await eventually(lambda: bool(cluster.prefill_jobs))
        await eventually(
            lambda: not (cluster.running_prefills or cluster.running_decodes or cluster.open_leases),
            within_s=1.0,
        )
        assert cluster.cancelled_prefills + cluster.cancelled_decodes == 1
        parts = router.app.state.parts
        await eventually(lambda: (parts.admission.load.requests, parts.bodies.held_bytes) == (0, 0))


async def test_case_34_many_clients_vanish_at_once() -> None:
    cluster = FakeCluster(Script(spoken("a" * 50) * 100, prefill_s=0.05, gap_s=0.2))
    config = RouterConfig(model_dir=Path("unused"), model_name="demo", max_in_flight_requests=2000)
    async with live_router(config, cluster) as router:
        ask = [
            _ask_and_leave(
                router, stream=n % 2 == 0, after_s=(n % 10) / 20, path="/v1/chat/completions", n=1 + n % 3
            )
            for n in range(250)
        ]
        await asyncio.gather(*ask)
        await eventually(
            lambda: not (cluster.running_prefills or cluster.running_decodes or cluster.open_leases),
            within_s=20.0,
        )
        parts = router.app.state.parts
        await eventually(lambda: (parts.admission.load.requests, parts.bodies.held_bytes) == (0, 0))
        assert parts.admission.load.tokens == 0
        cluster.script = Script(spoken("</think>well"))
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"200 OK" in await reader.read()
        writer.close()


async def test_case_35_hits_are_accounted(router: Bench) -> None:
    # That a second asking really hits, with equal text, is shown on real processes in integration/stack
    router.cluster.script.cached_tokens = 16
    router.cluster.script.ids = spoken("</think>x")
    usage = (await router.post()).json()["usage"]
    assert usage["prompt_cache_hit_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 16
    assert usage["prompt_cache_hit_tokens"] + usage["prompt_cache_miss_tokens"] == usage["prompt_tokens"]
