"""Requests go elsewhere while workers drain and are replaced; nobody counts that as a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from epdserve.services.errors import Draining, Unavailable
from epdserve.services.router.request import Trail
from epdserve.services.types import (
    ErrorInfo,
    FinishReason,
    TokenChunk,
)
from support.fake_cluster import FakeCluster, Script
from support.pipelines import OUTPUT, pipeline_of, pool, request, run


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
