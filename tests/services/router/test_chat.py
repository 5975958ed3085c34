"""Chat completions through the whole application, with a scripted cluster behind it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from support.fake_cluster import FakeCluster, Script
from support.real_tokenizer import real_tokenizer


def ids(text: str) -> list[int]:
    """Ids of a text, markers as markers."""
    return real_tokenizer().native.encode(text)


def config(**changes: Any) -> RouterConfig:
    return RouterConfig(model_dir=Path("unused"), model_name="demo", **changes)


def client_of(cluster: FakeCluster, **changes: Any) -> httpx.AsyncClient:
    app = create_app(config(**changes), cluster, tokenizer=real_tokenizer())
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router")


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(Script(ids("add them</think>\n\nIt is 4."), cached_tokens=16))


@pytest.fixture
async def client(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(cluster) as client:
        yield client


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "2+2?"}], **changes}


async def post(
    client: httpx.AsyncClient, path: str = "/v1/chat/completions", **changes: Any
) -> httpx.Response:
    return await client.post(path, json=body(**changes))


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


async def test_a_whole_answer(client: httpx.AsyncClient, cluster: FakeCluster) -> None:
    response = await post(client)
    assert response.status_code == 200, response.text
    answer = response.json()
    choice = answer["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": "It is 4.",
        "reasoning_content": "add them",
        "reasoning": "add them",
    }
    assert choice["finish_reason"] == "stop"
    prompt = len(cluster.prefill_jobs[0][1].tokens)
    sampled = len(cluster.script.ids) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": 16},
        "prompt_cache_hit_tokens": 16,
        "prompt_cache_miss_tokens": prompt - 16,
        "completion_tokens_details": {"reasoning_tokens": 2},
    }
    assert "epdserve" not in answer
    assert cluster.open_leases == set()


@pytest.mark.parametrize("batch", [1, 3, 100])
async def test_a_stream_says_the_same_as_a_whole_answer(
    client: httpx.AsyncClient, cluster: FakeCluster, batch: int
) -> None:
    cluster.script.batch = batch
    whole = (await post(client)).json()["choices"][0]["message"]
    chunks = events(await post(client, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None, "reasoning_content": "", "reasoning": ""}
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_comes_last_and_only_when_asked_for(client: httpx.AsyncClient) -> None:
    chunks = events(await post(client, stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == (await post(client)).json()["usage"]
