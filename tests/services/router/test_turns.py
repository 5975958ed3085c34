"""One turn and the next through the whole application: drawn ids come back, and tails are kept for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from support.fake_cluster import FakeCluster, Script
from support.real_tokenizer import real_tokenizer

QUESTION = {"role": "user", "content": "2+2?"}


def ids(text: str) -> list[int]:
    """Ids of a text, markers as markers."""
    return real_tokenizer().native.encode(text)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(Script(ids("add them</think>\n\nIt is 4.")))


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    config = RouterConfig(model_dir=Path("unused"), model_name="demo")
    app = create_app(config, cluster, tokenizer=real_tokenizer())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as client:
        yield client


async def post(client: httpx.AsyncClient, *messages: dict[str, Any], **changes: Any) -> httpx.Response:
    body = {"model": "demo", "messages": [QUESTION, *messages], **changes}
    return await client.post("/v1/chat/completions", json=body)


async def test_the_next_turn_carries_the_ids_that_were_drawn(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    """One id a letter: no encoder would cut the text that way."""
    drawn = [ids(letter)[0] for letter in "add them"] + ids("</think>") + [ids(x)[0] for x in "It is 4."]
    cluster.script.ids = drawn
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    reply = (await post(client, tools=[tool])).json()["choices"][0]["message"]
    cached = cluster.prefill_jobs[0][1].tokens.tolist() + drawn + ids("<｜end▁of▁sentence｜>")
    spliced = 'epdserve_router_turns_total{memo="spliced"} 2.0'
    async with asyncio.timeout(5):
        while True:  # what was drawn is noted beside the answer
            await post(client, reply, {"role": "user", "content": "Sure?"}, tools=[tool])
            if spliced in (await client.get("/metrics")).text:
                break
    job = cluster.prefill_jobs[-1][1]
    assert job.tokens[: len(cached)].tolist() == cached
    assert 'epdserve_router_answers_kept_total{ids="other"}' in (await client.get("/metrics")).text


async def test_a_deterministic_turn_is_made_of_text_alone(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    """What the memo holds depends on what was asked here before."""
    cluster.script.ids = [ids(x)[0] for x in "add"] + ids("</think>") + [ids(x)[0] for x in "It is 4."]
    plain = {"thinking": {"type": "disabled"}, "deterministic": True}
    reply = (await post(client)).json()["choices"][0]["message"]
    for _ in range(20):  # what was drawn is noted beside the answer
        await post(client, reply, {"role": "user", "content": "Sure?"}, **plain)
    prompts = {job.tokens.tobytes() for _, job in cluster.prefill_jobs[1:]}
    assert len(prompts) == 1
    assert 'epdserve_router_turns_total{memo="spliced"}' not in (await client.get("/metrics")).text


async def test_tails_are_asked_for_where_the_next_turn_leaves(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    await post(client)
    await post(client, tools=[tool])
    await post(client, thinking={"type": "disabled"})
    prompts = [job for _, job in cluster.prefill_jobs]
    assert [job.tail_at for job in prompts] == [len(prompts[0].tokens) - 1, len(prompts[1].tokens) - 1, None]
    assert prompts[0].tokens[-1] == ids("<think>")[0]
    assert [job.keep_tail for _, job in cluster.decode_jobs] == [False, True, True]
