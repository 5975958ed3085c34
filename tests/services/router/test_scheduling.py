"""Targets, priorities and efforts from the body of a request to the jobs that workers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from epdserve.services.policy.length_model import PromptClass
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.slo import SloSettings
from epdserve.services.types import WorkerRole
from fastapi import FastAPI
from support.fake_cluster import FakeCluster, Script, worker_info
from support.real_tokenizer import real_tokenizer

USER = {"role": "user", "content": "2+2?"}


def ids(text: str) -> list[int]:
    return real_tokenizer().native.encode(text)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(Script(ids("add</think>\n\nIt is 4."), cached_tokens=0))


def app_of(cluster: FakeCluster, **slo: Any) -> FastAPI:
    config = RouterConfig(model_dir=Path("unused"), model_name="demo", slo=SloSettings(**slo))
    return create_app(config, cluster, tokenizer=real_tokenizer())


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router")


async def ask(
    client: httpx.AsyncClient, *, headers: dict[str, str] | None = None, **changes: Any
) -> httpx.Response:
    body = {"model": "demo", "messages": [USER], **changes}
    return await client.post("/v1/chat/completions", json=body, headers=headers or {})


async def test_workers_are_told_how_urgent_a_request_is(cluster: FakeCluster) -> None:
    async with client_of(app_of(cluster)) as client:
        await ask(client)
        await ask(client, slo_class="standard", priority=-7)
        await ask(client, headers={"x-slo-class": "batch", "x-ttft-target-s": "9", "x-priority": "4"})
    usual, standard, batch = (job.schedule for _, job in cluster.prefill_jobs)
    assert (usual.target_s, usual.priority) == (2.0, 0)
    assert (standard.target_s, standard.priority) == (6.0, 7)
    assert (batch.target_s, batch.priority) == (9.0, -4)
    assert batch.waited_s > 0
    assert [job.schedule.lengths for _, job in cluster.decode_jobs] == [batch.lengths] * 3


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"slo_class": "gold"}, "slo_class"),
        ({"ttft_target_s": 0}, "ttft_target_s"),
        ({"tpot_target_s": -1.0}, "tpot_target_s"),
        ({"priority": 101}, "priority"),
        ({"headers": {"x-ttft-target-s": "nan"}}, "x-ttft-target-s"),
    ],
)
async def test_impossible_wishes_are_refused_by_name(
    cluster: FakeCluster, changes: dict[str, Any], param: str
) -> None:
    async with client_of(app_of(cluster)) as client:
        answer = await ask(client, **changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_target_that_will_be_missed_is_a_429_that_says_when_to_come_back() -> None:
    infos = [
        worker_info("p0", WorkerRole.PREFILL, queued_tokens=50_000),
        worker_info("d0", WorkerRole.DECODE),
    ]
    cluster = FakeCluster(Script(ids("add</think>\n\nIt is 4.")), infos=infos)
    async with client_of(app_of(cluster)) as client:
        assert (await ask(client)).status_code == 200
        assert (await ask(client, slo_class="batch")).status_code == 200
        late = await ask(client, ttft_target_s=1.0)
    # 50,000 tokens at the 10,000/s that are taken for granted at first, less the second that is allowed
    assert late.status_code == 429
    assert late.json()["error"]["code"] == "rate_limit_exceeded"
    assert 3 <= int(late.headers["retry-after"]) <= 5
    assert len(cluster.prefill_jobs) == 2


async def test_a_floor_is_granted_instead_of_a_429_and_kept_for_the_conversation(
    cluster: FakeCluster,
) -> None:
    app = app_of(cluster, refuse_late=True, tpot_target_s=0.001)
    for effort, tokens in ((100, 4000), (30, 100)):
        for _ in range(40):
            app.state.parts.placer.estimates.lengths.observe(_class(effort), tokens)
    async with client_of(app) as client:
        refused = await ask(client, reasoning_effort=100)
        assert refused.status_code == 429
        first = await ask(client, reasoning_effort=100, effort_floor=30, receipt=True)
        assert first.status_code == 200, first.text
        assert first.json()["epdserve"]["effort"] == {"asked": 100, "granted": 30}
        assert (first.headers["x-effort-asked"], first.headers["x-effort-granted"]) == ("100", "30")
        app.state.parts.foresight._settings = SloSettings()  # there is room again
        turns = [USER, {"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "why?"}]
        second = await ask(client, messages=turns, reasoning_effort=100, effort_floor=30)
        assert second.headers["x-effort-granted"] == "30"
        other = await ask(
            client,
            messages=[{"role": "user", "content": "x"}, *turns[1:]],
            reasoning_effort=100,
            effort_floor=30,
        )
        assert other.headers["x-effort-granted"] == "100"
    lowered, kept, fresh = (bytes(job.tokens) for _, job in cluster.prefill_jobs)
    assert lowered[:80] == kept[:80] != fresh[:80]


def _class(effort: int) -> PromptClass:
    return PromptClass(effort, "", 20)
