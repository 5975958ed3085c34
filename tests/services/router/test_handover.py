"""Requests go elsewhere while workers drain and are replaced; nobody counts that as a failure."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from epdserve.services.errors import Draining, Unavailable
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.pipeline import Pipeline, PipelineLimits
from epdserve.services.router.request import GenerateRequest, Trail
from epdserve.services.router.routing import Placer
from epdserve.services.types import (
    ErrorInfo,
    FinishReason,
    SamplingParams,
    TokenChunk,
    WorkerInfo,
    WorkerRole,
    token_ids,
)
from support.fake_cluster import FakeCluster, Script, worker_info

PROMPT = token_ids(range(100, 150))
KEY = b"k" * 32
OUTPUT = list(range(200, 220))


def pool(prefills: int = 1, decodes: int = 1) -> list[WorkerInfo]:
    return [
        *(worker_info(f"p{i}", WorkerRole.PREFILL) for i in range(prefills)),
        *(worker_info(f"d{i}", WorkerRole.DECODE) for i in range(decodes)),
    ]


def pipeline_of(cluster: FakeCluster, **limits: Any) -> tuple[Pipeline, InFlightLedger]:
    ledger = InFlightLedger()
    limits = {"decode_stall_s": 2.0, "replacement_wait_s": 0.0, **limits}
    return Pipeline(cluster, Placer(cluster, ledger), ledger, PipelineLimits(**limits)), ledger


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "tokens": PROMPT,
        "tenant_key": KEY,
        "sampling": SamplingParams(seed=1, max_tokens=100),
        "deadline_at": asyncio.get_running_loop().time() + 5,
        **changes,
    }
    return GenerateRequest(**fields)


async def run(
    pipeline: Pipeline, request: GenerateRequest, trail: Trail | None = None
) -> tuple[list[int], FinishReason]:
    """All tokens; checks offsets on the way."""
    tokens: list[int] = []
    async with aclosing(pipeline.generate(request, trail or Trail(0.0))) as chunks:
        async for chunk in chunks:
            assert chunk.offset == len(tokens)
            assert chunk.error is None
            tokens.extend(chunk.tokens)
            if chunk.finish_reason is not None:
                return tokens, chunk.finish_reason
    raise AssertionError("no finish reason")


async def test_workers_that_drain_hand_a_stream_on_however_often() -> None:
    cluster = FakeCluster(Script(OUTPUT), pool(decodes=8))
    pipeline, _ = pipeline_of(cluster, max_resumes=1)

    def hands_over(worker: str, job: Any) -> list[Any]:
        chunks = FakeCluster._chunks(cluster, worker, job)
        if len(cluster.decode_jobs) > 6:
            return chunks
        error = ErrorInfo.of(Draining("stopping", worker=worker))
        return [*chunks[:2], TokenChunk(job.request_id, chunks[1].end, (), None, error)]

    cluster._chunks = hands_over  # type: ignore[method-assign]
    trail = Trail(0.0)
    assert await run(pipeline, request(), trail) == ([*OUTPUT, 1], FinishReason.STOP)
    assert (trail.handovers, trail.resumes, trail.retries) == (6, 0, 0)
    assert len({worker for worker, _ in cluster.decode_jobs}) == 7
    assert len({job.request_id for _, job in cluster.decode_jobs}) == 7


async def test_a_worker_that_drains_and_says_so_twice_is_a_failure() -> None:
    cluster = FakeCluster(Script(OUTPUT, prefill_errors=[Draining("stopping", worker="x")] * 9), pool())
    pipeline, _ = pipeline_of(cluster)
    with pytest.raises(Draining):
        await run(pipeline, request())
    assert len(cluster.prefill_jobs) == 2


async def test_a_new_request_waits_for_workers_that_were_there_a_moment_ago() -> None:
    cluster = FakeCluster(Script(OUTPUT), pool())
    pipeline, _ = pipeline_of(cluster, replacement_wait_s=5.0)
    with_none = FakeCluster(Script(OUTPUT), [])
    with pytest.raises(Unavailable):  # nobody was ever there: nothing to wait for
        await asyncio.wait_for(run(pipeline_of(with_none, replacement_wait_s=5.0)[0], request()), 1)
    await run(pipeline, request())
    infos, cluster.infos = cluster.infos, []
    asyncio.get_running_loop().call_later(0.1, lambda: cluster.infos.extend(infos))
    tokens, _ = await run(pipeline, request(request_id="r2"))
    assert tokens == [*OUTPUT, 1]
