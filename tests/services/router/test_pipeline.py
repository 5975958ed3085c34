"""The request's way through the cluster: placement, retries, resuming, leases, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from epdserve.kvstore.hashing import prefix_hash_chain
from epdserve.services.errors import (
    Internal,
    InvalidRequest,
    LeaseLost,
    Overloaded,
    ServiceError,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from epdserve.services.router.request import Trail
from epdserve.services.types import (
    FinishReason,
    SamplingParams,
    WorkerRole,
    WorkerState,
)
from support.fake_cluster import DETERMINISTIC_ROOT, ROOT, FakeCluster, Script, worker_info
from support.pipelines import KEY, OUTPUT, PROMPT, pipeline_of, pool, request, run


async def test_prompt_and_handle_reach_the_workers() -> None:
    cluster = FakeCluster(Script(OUTPUT), pool())
    pipeline, ledger = pipeline_of(cluster)
    trail = Trail(0.0)
    tokens, reason = await run(pipeline, request(exact=True, trace="t"), trail)
    assert (tokens, reason) == ([*OUTPUT, 1], FinishReason.STOP)
    ((prefill_worker, prefill),) = cluster.prefill_jobs
    ((decode_worker, decode),) = cluster.decode_jobs
    assert (prefill_worker, decode_worker) == ("p0", "d0")
    assert prefill.tokens is PROMPT
    assert prefill.exact
    assert decode.exact
    assert (prefill.trace, prefill.tenant_key) == ("t", KEY)
    assert decode.handle is not None
    assert decode.handle.lease == "lease0"
    assert trail.prefill is not None
    assert trail.decode is not None
    assert cluster.released == []
    assert ledger.requests("p0") == ledger.requests("d0") == 0


async def test_the_longest_prefix_hit_wins() -> None:
    cluster = FakeCluster(Script(OUTPUT), pool(prefills=3))
    hashes = prefix_hash_chain(PROMPT, block_tokens=16, root=ROOT, tenant_key=KEY)
    cluster.held = {hashes[0]: {"p1", "p2"}, hashes[1]: {"p2"}, hashes[2]: {"p1"}}
    pipeline, _ = pipeline_of(cluster)
    await run(pipeline, request())
    assert cluster.prefill_jobs[0][0] == "p2"
    await run(pipeline, request(tenant_key=b"other"))
    assert cluster.prefill_jobs[1][0] == "p0"


async def test_what_the_store_of_a_machine_holds_draws_prompts_to_it() -> None:
    infos = [
        worker_info("p0", WorkerRole.PREFILL, machine="m0"),
        worker_info("p1", WorkerRole.PREFILL, machine="m1"),
        worker_info("s1", WorkerRole.STORE, machine="m1", cache_root=b""),
        worker_info("d0", WorkerRole.DECODE),
    ]
    cluster = FakeCluster(Script(OUTPUT), infos)
    pipeline, _ = pipeline_of(cluster)
    for block_hash in prefix_hash_chain(PROMPT, block_tokens=16, root=ROOT, tenant_key=KEY):
        cluster.held[block_hash] = {"s1"}
    await run(pipeline, request())
    assert [worker for worker, _ in cluster.prefill_jobs] == ["p1"]


async def test_own_load_counts_before_any_heartbeat_tells_it() -> None:
    cluster = FakeCluster(Script(OUTPUT, prefill_s=0.05), pool(prefills=2, decodes=2))
    pipeline, _ = pipeline_of(cluster)
    await asyncio.gather(*(run(pipeline, request(request_id=f"r{i}")) for i in range(4)))
    assert sorted(worker for worker, _ in cluster.prefill_jobs) == ["p0", "p0", "p1", "p1"]
    assert sorted(worker for worker, _ in cluster.decode_jobs) == ["d0", "d0", "d1", "d1"]


async def test_workers_that_are_not_ready_get_nothing() -> None:
    infos = pool(prefills=2)
    infos[0] = replace(infos[0], state=WorkerState.DRAINING)
    cluster = FakeCluster(Script(OUTPUT), infos)
    pipeline, _ = pipeline_of(cluster)
    await run(pipeline, request())
    assert cluster.prefill_jobs[0][0] == "p1"


async def test_pools_of_two_layouts_are_never_mixed() -> None:
    infos = pool(prefills=2, decodes=1)
    infos[0] = replace(infos[0], cache_root=b"old")
    cluster = FakeCluster(Script(OUTPUT), infos)
    pipeline, _ = pipeline_of(cluster)
    await run(pipeline, request())
    assert cluster.prefill_jobs[0][0] == "p1"
    cluster.infos = [infos[0], infos[2]]
    with pytest.raises(Unavailable, match="no matching prefill and decode worker"):
        await run(pipeline, request())


@pytest.mark.parametrize("missing", ["prefill", "decode"])
async def test_no_worker_is_said(missing: str) -> None:
    cluster = FakeCluster(Script(OUTPUT), [info for info in pool() if info.role != missing])
    pipeline, _ = pipeline_of(cluster)
    with pytest.raises(Unavailable, match=f"no {missing} worker is ready") as caught:
        await run(pipeline, request())
    assert caught.value.retry_after_s


@pytest.mark.parametrize(
    "error", [WorkerLost("gone"), Unavailable("refused"), WorkerLost("gone", worker="p0")]
)
async def test_a_prefill_worker_lost_costs_one_retry_elsewhere(error: ServiceError) -> None:
    cluster = FakeCluster(Script(OUTPUT, prefill_errors=[error]), pool(prefills=2))
    pipeline, _ = pipeline_of(cluster)
    trail = Trail(0.0)
    tokens, _ = await run(pipeline, request(), trail)
    assert tokens == [*OUTPUT, 1]
    assert [worker for worker, _ in cluster.prefill_jobs] == ["p0", "p1"]
    assert cluster.prefill_jobs[0][1].request_id != cluster.prefill_jobs[1][1].request_id
    assert (trail.retries, trail.lost_workers) == (1, ["p0"])


async def test_a_second_loss_before_the_first_token_is_the_clients() -> None:
    errors: list[ServiceError] = [WorkerLost("gone"), WorkerLost("gone")]
    cluster = FakeCluster(Script(OUTPUT, prefill_errors=errors), pool(prefills=3))
    pipeline, _ = pipeline_of(cluster)
    with pytest.raises(WorkerLost):
        await run(pipeline, request())
    assert len(cluster.prefill_jobs) == 2


@pytest.mark.parametrize("error", [InvalidRequest("no"), Overloaded("full", retry_after_s=3)])
async def test_what_another_worker_would_not_mend_is_not_retried(error: ServiceError) -> None:
    cluster = FakeCluster(Script(OUTPUT, prefill_errors=[error]), pool(prefills=2))
    pipeline, _ = pipeline_of(cluster)
    with pytest.raises(type(error)):
        await run(pipeline, request())
    assert len(cluster.prefill_jobs) == 1


@pytest.mark.parametrize("error", [Internal("KeyError at 0x3"), Unauthenticated("cluster token")])
async def test_what_went_wrong_inside_a_worker_stays_inside(error: ServiceError) -> None:
    cluster = FakeCluster(Script(OUTPUT, prefill_errors=[error]), pool())
    pipeline, _ = pipeline_of(cluster)
    with pytest.raises(Internal, match=r"^p0 failed$"):
        await run(pipeline, request())


async def test_the_only_worker_lost_waits_for_its_next_life() -> None:
    cluster = FakeCluster(Script(OUTPUT, prefill_errors=[WorkerLost("gone")]), pool())
    pipeline, _ = pipeline_of(cluster, replacement_wait_s=5.0)
    running = asyncio.create_task(run(pipeline, request()))
    await asyncio.sleep(0.1)
    assert len(cluster.prefill_jobs) == 1
    cluster.infos[0] = replace(cluster.infos[0], incarnation="2")
    assert (await running)[0] == [*OUTPUT, 1]


async def test_a_decode_worker_lost_before_the_first_token_is_replaced_and_its_lease_ended() -> None:
    cluster = FakeCluster(Script(OUTPUT, decode_errors=[WorkerLost("gone")]), pool(decodes=2))
    pipeline, _ = pipeline_of(cluster)
    assert (await run(pipeline, request()))[0] == [*OUTPUT, 1]
    assert [worker for worker, _ in cluster.decode_jobs] == ["d0", "d1"]
    assert cluster.released == ["lease0"]
    assert cluster.open_leases == set()


async def test_a_lost_lease_prefills_again_and_may_stay_where_it_was() -> None:
    cluster = FakeCluster(Script(OUTPUT, decode_errors=[LeaseLost("ended")]), pool())
    pipeline, _ = pipeline_of(cluster)
    trail = Trail(0.0)
    assert (await run(pipeline, request(), trail))[0] == [*OUTPUT, 1]
    assert trail.lost_workers == []
    first, second = (job.request_id for _, job in cluster.decode_jobs)
    assert first != second


@pytest.mark.parametrize("die_after", [1, 7, 20])
async def test_a_decode_worker_lost_in_mid_stream_loses_and_doubles_nothing(die_after: int) -> None:
    cluster = FakeCluster(Script(OUTPUT, die_after=die_after), pool(decodes=2))
    pipeline, _ = pipeline_of(cluster)
    trail = Trail(0.0)
    assert await run(pipeline, request(), trail) == ([*OUTPUT, 1], FinishReason.STOP)
    assert trail.resumes == 1
    resumed_prefill, resumed = cluster.prefill_jobs[1][1], cluster.decode_jobs[1][1]
    assert resumed_prefill.tokens.tolist() == [*PROMPT.tolist(), *OUTPUT[:die_after]]
    assert resumed.tokens.tolist() == PROMPT.tolist()
    assert resumed.emitted.tolist() == OUTPUT[:die_after]
    assert resumed.sampling == cluster.decode_jobs[0][1].sampling
    assert cluster.decode_jobs[1][0] == "d1"


async def test_a_worker_lost_between_last_token_and_finish_reason_costs_nothing() -> None:
    cluster = FakeCluster(Script(OUTPUT, stop_id=None, die_after=4, batch=4), pool(decodes=2))
    pipeline, _ = pipeline_of(cluster)
    sampling = SamplingParams(seed=1, max_tokens=4)
    cluster._chunks = _without_end(cluster)  # type: ignore[method-assign]
    assert await run(pipeline, request(sampling=sampling)) == (OUTPUT[:4], FinishReason.LENGTH)
    assert len(cluster.decode_jobs) == 1


def _without_end(cluster: FakeCluster) -> Any:
    def chunks(worker: str, job: Any) -> Sequence[Any]:
        whole = FakeCluster._chunks(cluster, worker, job)
        return [replace(whole[0], finish_reason=None)]

    return chunks


async def test_a_deterministic_request_is_resumed_from_its_prompt() -> None:
    """The tokens that were delivered are run again by decoding, as they were the first time."""
    cluster = FakeCluster(Script(OUTPUT, die_after=7), pool(decodes=2))
    pipeline, _ = pipeline_of(cluster)
    tokens, _ = await run(pipeline, request(deterministic=True))
    assert tokens == [*OUTPUT, 1]
    prefills, decodes = ([job for _, job in jobs] for jobs in (cluster.prefill_jobs, cluster.decode_jobs))
    assert [job.tokens.tolist() for job in prefills] == [PROMPT.tolist()] * 2
    assert all(job.deterministic for job in (*prefills, *decodes))
    assert [job.emitted.tolist() for job in decodes] == [[], OUTPUT[:7]]


async def test_a_deterministic_request_is_resumed_on_its_back_end_or_not_at_all() -> None:
    """Other workers are there, whose bits are other ones."""
    other = [
        replace(info, worker=f"{info.worker}-other", deterministic_root=b"o" * 32) for info in pool(decodes=1)
    ]
    cluster = FakeCluster(Script(OUTPUT, die_after=7), [*pool(), *other])
    pipeline, _ = pipeline_of(cluster)
    with pytest.raises(Unavailable):
        await run(pipeline, request(deterministic=True))
    assert len(cluster.decode_jobs) == 1


async def test_deterministic_requests_meet_blocks_of_their_own_names() -> None:
    hashes = prefix_hash_chain(PROMPT, block_tokens=16, root=DETERMINISTIC_ROOT, tenant_key=KEY)
    cluster = FakeCluster(Script(OUTPUT), pool(prefills=2))
    cluster.held = {block_hash: {"p1"} for block_hash in hashes}
    pipeline, _ = pipeline_of(cluster)
    await run(pipeline, request(deterministic=True))
    assert cluster.prefill_jobs[0][0] == "p1"


async def test_workers_that_take_no_deterministic_requests_get_none() -> None:
    old = [replace(info, deterministic_root=b"") for info in pool()]
    pipeline, _ = pipeline_of(FakeCluster(Script(OUTPUT), old))
    with pytest.raises(Unavailable):
        await run(pipeline, request(deterministic=True))


async def test_deaths_without_end_end() -> None:
    cluster = FakeCluster(Script(OUTPUT), pool(decodes=9))
    pipeline, _ = pipeline_of(cluster, max_resumes=2)

    def dies(worker: str, job: Any) -> list[Any]:
        cluster.script.die_after = len(job.emitted) + 1
        return FakeCluster._chunks(cluster, worker, job)

    cluster._chunks = dies  # type: ignore[method-assign]
    with pytest.raises(WorkerLost):
        await run(pipeline, request())
    assert len(cluster.decode_jobs) == 3


async def test_a_decode_worker_that_says_nothing_is_lost() -> None:
    cluster = FakeCluster(Script(OUTPUT, first_gap_s=1.0), pool(decodes=2))
    pipeline, _ = pipeline_of(cluster, decode_stall_s=0.05)
    with pytest.raises(WorkerLost, match="no token"):
        await run(pipeline, request())
    assert cluster.running_decodes == 0


async def test_closing_during_prefill_cancels_it() -> None:
    cluster = FakeCluster(Script(OUTPUT, prefill_s=60.0), pool())
    pipeline, ledger = pipeline_of(cluster)
    task = asyncio.create_task(run(pipeline, request()))
    await asyncio.sleep(0.01)
    assert ledger.tokens("p0") == len(PROMPT)
    task.cancel()
    await asyncio.wait([task])
    assert (cluster.cancelled_prefills, cluster.running_prefills, ledger.tokens("p0")) == (1, 0, 0)


async def test_a_call_that_fails_as_it_is_cancelled_is_not_retried() -> None:
    cluster = FakeCluster(Script(OUTPUT), pool(prefills=2))
    pipeline, _ = pipeline_of(cluster)
    calls = 0

    async def prefill(worker: str, job: Any, *, timeout_s: float) -> Any:
        nonlocal calls
        calls += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise WorkerLost("gone", worker=worker) from None

    cluster.prefill = prefill  # type: ignore[method-assign]
    task = asyncio.create_task(run(pipeline, request()))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task], timeout=1)
    assert task.cancelled()
    assert calls == 1


async def test_closing_before_the_first_token_ends_the_lease() -> None:
    cluster = FakeCluster(Script(OUTPUT, first_gap_s=60.0), pool())
    pipeline, _ = pipeline_of(cluster)
    task = asyncio.create_task(run(pipeline, request()))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert (cluster.running_decodes, cluster.cancelled_decodes) == (0, 1)
    assert cluster.released == ["lease0"]


async def test_closing_in_mid_stream_cancels_and_releases_nothing() -> None:
    cluster = FakeCluster(Script(OUTPUT, gap_s=0.001), pool())
    pipeline, _ = pipeline_of(cluster)
    async with aclosing(pipeline.generate(request(), Trail(0.0))) as chunks:
        await anext(chunks)
    assert (cluster.running_decodes, cluster.cancelled_decodes) == (0, 1)
    assert cluster.released == []
