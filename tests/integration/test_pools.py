"""Prefill and decode workers with real servers, registry and NIXL, against one process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from epdserve.services.engine.config import EngineSettings
from epdserve.services.errors import InvalidRequest, Unavailable
from epdserve.services.local.config import LocalSettings
from epdserve.services.local.engine import LocalEngine
from epdserve.services.rpc.watch import watch_blocks
from epdserve.services.types import SamplingParams, WorkerRole, WorkerState
from support.engine import TENANT, greedy, prompt
from support.golden import TINY
from support.pools import DECODE, PREFILL, TOKEN, Pools, engine_table, pools

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pools]:
    async with pools(tmp_path_factory.mktemp("pools")) as live:
        await live.start("prefill-0", PREFILL, engine=engine_table())
        await live.start("decode-0", DECODE, engine=engine_table())
        yield live


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_leaks(live: Pools) -> AsyncIterator[None]:
    yield
    await live.assert_conserved("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEngine]:
    """One process with the same settings; each test must send it what it sends the pools, so that the hits agree."""
    settings = LocalSettings(engine=EngineSettings.model_validate(engine_table()))
    with LocalEngine(TINY, settings) as engine:
        yield engine
        assert engine.leaked_pages() == 0


# window 8; 16 entries are chosen of those of 16 or 32 tokens; the candidate pool is 32 entries
@pytest.mark.parametrize("length", [3, 8, 20, 45, 120])
async def test_greedy_tokens_equal_one_process(live: Pools, local: LocalEngine, length: int) -> None:
    tokens, last = await live.generate(prompt(length, 50), greedy(8))
    [wanted] = local.generate([prompt(length, 50)], greedy(8), tenant_key=TENANT)
    assert tuple(tokens) == wanted.tokens
    assert last.finish_reason is wanted.finish_reason
    assert last.receipt is not None
    assert (last.receipt.own_tokens, last.receipt.recomputed_tokens) == (
        wanted.receipt.own_tokens,
        wanted.receipt.recomputed_tokens,
    )


# Hits of two blocks and more, in prompts below and above top-k and candidate pool
@pytest.mark.parametrize("length", [17, 20, 45, 120])
async def test_a_prompt_asked_again_equals_one_process(live: Pools, local: LocalEngine, length: int) -> None:
    tokens = prompt(length, 500 + length)
    for time in range(2):
        result = await live.prefill("prefill-0", tokens)
        answer, _ = await live.decode("decode-0", live.job(tokens, greedy(8), result.handle))
        [wanted] = local.generate([tokens], greedy(8), tenant_key=TENANT)
        assert tuple(answer) == wanted.tokens
        assert (result.cached_tokens, result.replayed_rows) == (
            wanted.prefill.cached_tokens,
            wanted.prefill.replayed_rows,
        )
        assert (result.cached_tokens > 0) == (time > 0)


async def test_conversation_with_prefix_hits_equals_one_process(live: Pools, local: LocalEngine) -> None:
    history = prompt(50, 60)
    for turn in range(3):
        result = await live.prefill("prefill-0", history)
        tokens, last = await live.decode("decode-0", live.job(history, greedy(7), result.handle))
        [wanted] = local.generate([history], greedy(7), tenant_key=TENANT)
        assert tuple(tokens) == wanted.tokens
        assert (result.cached_tokens, result.replayed_rows) == (
            wanted.prefill.cached_tokens,
            wanted.prefill.replayed_rows,
        )
        assert (result.cached_tokens > 0) == (turn > 0)
        assert last.receipt is not None
        assert last.receipt.pulled_tokens == wanted.receipt.pulled_tokens
        history = np.concatenate([history, tokens, prompt(9, 61 + turn)])


async def test_requests_together_draw_what_one_process_draws(live: Pools, local: LocalEngine) -> None:
    params = [
        SamplingParams(seed=n, max_tokens=4 + n, temperature=0.5 * n, top_k=30 * (n % 2), ignore_eos=True)
        for n in range(5)
    ]
    prompts = [prompt(10 + 17 * n, 70 + n) for n in range(5)]
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(live.generate(p, s)) for p, s in zip(prompts, params, strict=True)]
    wanted = local.generate(prompts, params, tenant_key=TENANT)
    assert [tuple(answer.result()[0]) for answer in answers] == [w.tokens for w in wanted]


async def test_exact_request_equals_one_process(live: Pools, local: LocalEngine) -> None:
    tokens, _ = await live.generate(prompt(50, 60), greedy(4), exact=True)
    [wanted] = local.generate([prompt(50, 60)], greedy(4), exact=True, tenant_key=TENANT)
    assert tuple(tokens) == wanted.tokens


async def test_choices_of_one_prefill_equal_requests_of_their_own(live: Pools, local: LocalEngine) -> None:
    params = SamplingParams(
        seed=40, max_tokens=5, temperature=1.0, frequency_penalty=0.5, logprobs=2, ignore_eos=True
    )
    each = [params.for_choice(n) for n in range(3)]
    result = await live.prefill("prefill-0", prompt(33, 90), exact=True, readers=3)
    jobs = [
        live.job(prompt(33, 90), one, handle, exact=True)
        for one, handle in zip(each, result.handles, strict=True)
    ]
    await live.session("decode-0")  # one for all of them
    answers = await asyncio.gather(*(live.decode("decode-0", job) for job in jobs))
    wanted = local.generate([prompt(33, 90)] * 3, each, exact=True, tenant_key=TENANT)
    assert [tuple(tokens) for tokens, _ in answers] == [w.tokens for w in wanted]
    assert len({w.tokens for w in wanted}) == 3
    assert [last.logprobs[-1] for _, last in answers] == [w.logprobs[-1] for w in wanted]


async def test_a_prompts_own_logprobs_come_with_its_prefill(live: Pools) -> None:
    result = await live.prefill("prefill-0", prompt(20, 91), exact=True, prompt_logprobs=2)
    told = result.prompt_logprobs
    assert told is not None
    assert (told.logprobs.shape, told.top_ids.shape, told.top_logprobs.shape) == ((19,), (19, 2), (19, 2))
    assert (told.logprobs <= told.top_logprobs[:, 0]).all()
    tokens, _ = await live.decode("decode-0", live.job(prompt(20, 91), greedy(1), result.handle, exact=True))
    assert len(tokens) == 1


async def test_heartbeats_tell_the_truth(live: Pools) -> None:
    live.runners["prefill-0"]._service._leases.end_all()  # type: ignore[union-attr]  # other tests' answers
    async with asyncio.timeout(10):
        while (prefill := await live.listed("prefill-0")).free_pages < 96:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    decode = await live.listed("decode-0")
    assert (prefill.role, decode.role) == (WorkerRole.PREFILL, WorkerRole.DECODE)
    assert prefill.state is decode.state is WorkerState.READY
    assert prefill.cache_root == decode.cache_root
    assert (prefill.block_tokens, prefill.total_pages, prefill.max_context_tokens) == (8, 96, 768)
    assert prefill.free_pages == 96
    assert (prefill.running, prefill.queued_tokens, prefill.step_age_s) == (0, 0, 0.0)


async def test_blocks_are_told_as_they_are_sealed(live: Pools) -> None:
    info = await live.listed("prefill-0")
    held: set[bytes] = set()
    await live.prefill("prefill-0", prompt(40, 80))
    runner = live.runners["prefill-0"]._service._host.runner  # type: ignore[union-attr]
    wanted = set(runner.names.chain(prompt(40, 80), TENANT)) | set(runner.names.chain(prompt(40, 81), TENANT))
    async with asyncio.timeout(10):
        started = False
        async for update in watch_blocks(info.address, role=WorkerRole.PREFILL, token=TOKEN):
            held = (set() if update.snapshot else held) | set(update.added) - set(update.removed)
            if not started:
                started = True
                await live.prefill("prefill-0", prompt(40, 81))
            if wanted <= held:
                break
    runner_leases = live.runners["prefill-0"]._service._leases  # type: ignore[union-attr]
    runner_leases.end_all()


async def test_impossible_jobs_are_refused_with_their_reason(live: Pools) -> None:
    with pytest.raises(InvalidRequest, match="exceed the context"):
        await live.prefill("prefill-0", [5] * 2000)
    with pytest.raises(InvalidRequest, match="token ids"):
        await live.prefill("prefill-0", [5, 600])
    with pytest.raises(InvalidRequest, match="empty"):
        await live.prefill("prefill-0", [])
    with pytest.raises(InvalidRequest, match="exceed the context"):
        await live.decode("decode-0", live.job([5] * 2000, greedy(3), None))


async def test_lease_of_another_incarnation_does_not_hold(live: Pools) -> None:
    handle = (await live.prefill("prefill-0", prompt(20, 90))).handle
    client = await live.client("prefill-0")
    assert not await client.release_lease(handle.lease, incarnation="0", deadline_s=5.0)
    assert await client.release_lease(handle.lease, incarnation=handle.incarnation, deadline_s=5.0)
    assert not await client.release_lease(handle.lease, incarnation=handle.incarnation, deadline_s=5.0)


async def test_handles_of_unknown_or_wrong_workers_cost_a_recomputation(live: Pools) -> None:
    handle = (await live.prefill("prefill-0", prompt(30, 95))).handle
    for n, wrong in enumerate(({"worker": "prefill-7"}, {"worker": "decode-0"}, {"incarnation": "0"})):
        job = live.job(prompt(30, 95), greedy(2), replace(handle, **wrong))
        _, last = await live.decode("decode-0", job)
        assert last.receipt is not None
        assert last.receipt.pulled_tokens == 0
        assert last.receipt.recomputed_tokens == (30 if n == 0 else 30 - 24)
    client = await live.client("prefill-0")
    assert await client.release_lease(handle.lease, incarnation=handle.incarnation, deadline_s=5.0)


async def test_worker_that_drains_takes_nothing_new_and_ends_what_runs(live: Pools) -> None:
    await live.start("decode-1", DECODE, engine=engine_table())
    long = live.job(prompt(9), greedy(30), None)
    running = asyncio.create_task(live.decode("decode-1", long))
    await live.until_running("decode-1")
    live.runners["decode-1"].ask_to_stop(20.0)
    await live.until_state("decode-1", WorkerState.DRAINING)
    with pytest.raises(Unavailable):
        await live.decode("decode-1", live.job(prompt(9), greedy(3), None))
    tokens, _ = await running
    assert len(tokens) == 30


async def test_worker_that_cannot_start_says_why_in_one_line(live: Pools, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"config\.json"):
        await live.start("prefill-9", PREFILL, engine=engine_table(model_dir=str(tmp_path)))
