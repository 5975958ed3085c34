"""Chat completions through the whole application, with a scripted cluster behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.errors import Overloaded, WorkerLost
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from epdserve.services.types import WorkerRole, WorkerState
from support.fake_cluster import FakeCluster, Script, worker_info
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


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAR = "\N{FULLWIDTH VERTICAL LINE}"
CALLS = (
    '<D calls>\n<D invoke name="f">\n<D parameter name="p" string="true">a "b"</D parameter>\n</D invoke>\n</D calls>'
).replace("D ", f"{BAR}DSML{BAR} ")


async def test_a_tool_call_streams_id_and_name_once_then_arguments(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.script.ids = ids("use it</think>ok\n\n" + CALLS)
    chunks = events(await post(client, stream=True, tools=[TOOL]))
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "f", "arguments": ""}
    assert calls[0]["type"] == "function"
    assert all(call.keys() == {"index", "function"} for call in calls[1:])
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"p": 'a "b"'}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole = (await post(client, tools=[TOOL])).json()["choices"][0]
    assert whole["message"]["content"] == "ok"
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    assert whole["finish_reason"] == "tool_calls"


async def test_content_beside_calls_alone_is_null_for_openai_and_empty_for_deepseek(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.script.ids = ids("use it</think>" + CALLS)
    answer = (await post(client, tools=[TOOL])).json()
    assert answer["choices"][0]["message"]["content"] is None
    answer = (await post(client, "/chat/completions", tools=[TOOL])).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == ""
    assert message["tool_calls"][0]["index"] == 0
    assert "reasoning" not in message


async def test_deepseeks_stream_has_usage_in_its_last_chunk(client: httpx.AsyncClient) -> None:
    chunks = events(await post(client, "/chat/completions", stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None, "reasoning_content": ""}
    assert {"content": "It", "reasoning_content": None} in [chunk["choices"][0]["delta"] for chunk in chunks]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last["choices"][0]["delta"] == {"content": "", "reasoning_content": None}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["prompt_cache_hit_tokens"] == 16


async def test_without_thinking_there_is_no_reasoning_key(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    cluster.script.ids = ids("just this")
    answer = (await post(client, thinking={"type": "disabled"})).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "just this"}
    assert "completion_tokens_details" not in answer["usage"]
    chunks = events(await post(client, stream=True, reasoning_effort="none"))
    assert all("reasoning_content" not in chunk["choices"][0]["delta"] for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_decoding_at_once(
    client: httpx.AsyncClient, cluster: FakeCluster, stream: bool
) -> None:
    cluster.script = Script(ids("a STOP</think>b STOP") + ids(" more") * 2000, gap_s=0.0001)
    response = await post(
        client, stream=stream, stop="STOP", stream_options={"include_usage": True} if stream else None
    )
    if stream:
        chunks = events(response)
        content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
        finish, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        choice = response.json()["choices"][0]
        content, finish, usage = (
            choice["message"]["content"],
            choice["finish_reason"],
            response.json()["usage"],
        )
    assert (content, finish) == ("b ", "stop")
    assert usage["completion_tokens"] == len(ids("a STOP</think>b STOP"))
    assert (cluster.running_decodes, cluster.cancelled_decodes) == (0, 1)


async def test_sampling_fields_reach_the_workers(client: httpx.AsyncClient, cluster: FakeCluster) -> None:
    await post(
        client,
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=2**64 - 1,
        max_completion_tokens=9,
        min_tokens=2,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        exact=True,
    )
    job = cluster.decode_jobs[0][1]
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 7, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-1, 9, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos, job.exact) == ((5, 6), True, True)


async def test_defaults_are_the_rest_of_the_context_and_a_random_seed(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    await post(client, max_tokens=3, max_completion_tokens=9)
    await post(client)
    first, second = (job.sampling for _, job in cluster.decode_jobs)
    assert first.max_tokens == 3
    assert second.max_tokens == 4096 - len(cluster.prefill_jobs[1][1].tokens)
    assert first.seed != second.seed
    assert (second.temperature, second.top_p) == (1.0, 1.0)


async def test_the_official_sampling_can_be_asked_for(cluster: FakeCluster) -> None:
    async with client_of(cluster, official_sampling=True, max_completion_tokens=50) as client:
        await post(client, temperature=0.3, top_p=0.5)
        await post(client, temperature=0.3, top_p=0.5, thinking={"type": "disabled"})
    thinking, plain = (job.sampling for _, job in cluster.decode_jobs)
    assert (thinking.temperature, thinking.top_p, thinking.max_tokens) == (1.0, 0.95, 50)
    assert (plain.temperature, plain.top_p) == (0.3, 1.0)


async def test_the_effort_is_in_the_prompt(client: httpx.AsyncClient, cluster: FakeCluster) -> None:
    for effort in ("low", "max", 60):
        await post(client, reasoning_effort=effort)
    await post(client, chat_template_kwargs={"enable_thinking": True, "reasoning_effort": 61})
    await post(client, chat_template_kwargs={"thinking": False})
    numbers = [job.tokens.tolist()[8] for _, job in cluster.prefill_jobs[:4]]
    assert numbers == [ids(text)[0] for text in ("50", "100", "60", "61")]
    assert cluster.prefill_jobs[4][1].tokens.tolist()[-1] == ids("</think>")[0]


async def test_a_receipt_tells_where_tokens_came_from(
    client: httpx.AsyncClient, cluster: FakeCluster
) -> None:
    receipt = (await post(client, receipt=True, reasoning_effort=60)).json()["epdserve"]
    prompt = len(cluster.prefill_jobs[0][1].tokens)
    wanted = {"device": 16, "tail": 0, "host": 0, "ssd": 0, "peer": 0, "computed": prompt - 16}
    assert receipt["tokens"] | wanted | {"transferred": prompt} == receipt["tokens"]
    assert receipt["effort"] == {"asked": 60, "granted": 60}
    assert receipt["workers"] == {"prefill": "p0", "decode": "d0", "lost": []}
    assert receipt["ms"]["total"] >= receipt["ms"]["first_token"] > 0
    chunks = events(await post(client, stream=True, receipt=True))
    assert [index for index, chunk in enumerate(chunks) if "epdserve" in chunk] == [len(chunks) - 1]


async def test_blocks_are_shared_unless_isolation_or_a_salt_says_no(cluster: FakeCluster) -> None:
    async def keys(isolation: str, *bodies: dict[str, Any]) -> list[bytes]:
        cluster.prefill_jobs.clear()
        async with client_of(cluster, isolation=isolation) as client:
            for fields in bodies:
                await post(client, **fields)
        return [job.tenant_key for _, job in cluster.prefill_jobs]

    a, b = await keys("none", {"user": "a"}, {"user_id": "b"})
    assert a == b
    a, b = await keys("user", {"user": "a"}, {"user_id": "b"})
    assert a != b
    a, b = await keys("none", {}, {"cache_salt": "s"})
    assert a != b


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_house_says_when_to_come_back(cluster: FakeCluster, stream: bool) -> None:
    cluster.script.prefill_s = 0.2
    async with client_of(cluster, max_in_flight_requests=1) as client:
        first = asyncio.create_task(post(client))
        await asyncio.sleep(0.05)
        response = await post(client, stream=stream)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await first).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_keep_their_status(cluster: FakeCluster, stream: bool) -> None:
    cluster.script.prefill_errors = [Overloaded("the queue is full", retry_after_s=2.4)]
    async with client_of(cluster, replacement_wait_s=0.0) as client:
        response = await post(client, stream=stream)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        cluster.infos = cluster.infos[:1]
        response = await post(client, stream=stream)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no decode worker is ready"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_of_a_request_is_kept(
    client: httpx.AsyncClient, cluster: FakeCluster, stream: bool
) -> None:
    cluster.script.first_gap_s = 5.0
    response = await post(client, stream=stream, deadline_s=0.05)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert cluster.running_decodes == 0


async def test_a_failure_in_mid_stream_is_one_error_event_and_the_end(cluster: FakeCluster) -> None:
    cluster.script.gap_s = 0.001
    cluster.script.die_after = 3
    async with client_of(cluster, max_resumes=0) as client:
        response = await post(client, stream=True)
    chunks = events(response)
    assert chunks[-1]["error"]["code"] == "service_unavailable"
    assert all("error" not in chunk for chunk in chunks[:-1])


async def test_a_dead_decode_worker_is_not_seen_by_the_client(cluster: FakeCluster) -> None:
    cluster.infos.append(worker_info("d1", WorkerRole.DECODE))
    async with client_of(cluster) as client:
        want = (await post(client)).json()
        cluster.script.die_after = 3
        got = (await post(client)).json()
        metrics = (await client.get("/metrics")).text
    assert got["choices"] == want["choices"]
    assert got["usage"] == want["usage"]
    assert "epdserve_router_resumes_total 1.0" in metrics


async def test_a_bug_is_a_500_and_says_nothing_of_itself(
    client: httpx.AsyncClient, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "workers", lambda: 1 / 0)
    response = await post(client)
    assert response.status_code == 500
    assert "ZeroDivisionError" not in response.text
    assert response.json()["error"]["type"] == "server_error"


async def test_a_silent_stream_gets_comments_without_an_empty_line(cluster: FakeCluster) -> None:
    cluster.script.first_gap_s = 0.1
    async with client_of(cluster, keep_alive_s=0.03) as client:
        text = (await post(client, stream=True)).text
    assert text.startswith(": keep-alive\n: keep-alive\n")
    assert ": keep-alive\n\n" not in text
    assert text.endswith("data: [DONE]\n\n")


async def test_small_endpoints(client: httpx.AsyncClient, cluster: FakeCluster) -> None:
    models = (await client.get("/v1/models")).json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "demo"
    assert models["data"][0]["max_model_len"] == 4096
    assert (await client.get("/models/demo")).status_code == 404
    assert (await client.get("/v1/models/demo")).json() == models["data"][0]
    assert (await client.get("/health")).json() == {"status": "ok"}
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["ready_workers"]) == (200, {"prefill": 1, "decode": 1})
    cluster.infos = [worker_info("p0", WorkerRole.PREFILL, state=WorkerState.STARTING)]
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "waiting")
    assert (await client.get("/version")).json()["model"] == "demo"


async def test_metrics_count_what_happened(client: httpx.AsyncClient, cluster: FakeCluster) -> None:
    await post(client)
    await post(client, temperature=9)
    cluster.script.prefill_errors = [WorkerLost("gone"), WorkerLost("gone")]
    cluster.infos.append(worker_info("p1", WorkerRole.PREFILL))
    await post(client)
    text = (await client.get("/metrics")).text
    assert 'epdserve_router_requests_total{outcome="ok"} 1.0' in text
    assert 'epdserve_router_requests_total{outcome="invalid_request"} 1.0' in text
    assert 'epdserve_router_requests_total{outcome="unavailable"} 1.0' in text
    assert "epdserve_router_cached_tokens_total 16.0" in text
    assert "epdserve_router_reasoning_tokens_total 2.0" in text
    assert "epdserve_router_time_to_first_token_seconds_count 1.0" in text


async def test_a_deterministic_answer(client: httpx.AsyncClient, cluster: FakeCluster) -> None:
    answer = (await post(client, deterministic=True, receipt=True)).json()
    assert answer["epdserve"]["deterministic"] is True
    ((_, prefill),), ((_, decode),) = cluster.prefill_jobs, cluster.decode_jobs
    assert (prefill.deterministic, decode.deterministic, decode.sampling.seed) == (True, True, 0)
    await post(client, deterministic=True, seed=5)
    assert cluster.decode_jobs[1][1].sampling.seed == 5
    await post(client)
    assert not cluster.decode_jobs[2][1].deterministic
