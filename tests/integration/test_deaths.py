"""Workers die of SIGKILL in the middle of a request: the stream goes on, nothing is lost or doubled (real processes).

CI runs a few points; all of them: ``pytest tests/integration/test_deaths.py -m "slow or not slow"``.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import pytest
import pytest_asyncio
from epdserve.services.pool.view import ClusterView
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.pipeline import Pipeline, PipelineLimits
from epdserve.services.router.request import GenerateRequest, Trail
from epdserve.services.router.routing import Placer
from epdserve.services.router.rpc_cluster import RpcCluster
from epdserve.services.types import PrefillJob, PrefillResult, token_ids
from support.engine import BLOCK_TOKENS, TENANT, DecodeBench, PrefillBench, Reference, greedy, prompt
from support.golden import TINY, tiny
from support.mortal import Doom, Mortals
from support.pools import DECODE, PREFILL, STORE, TOKEN, Pools, engine_table, pools

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

PROMPT, OUTPUT = 45, 30
CUT = 24
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")  # one more than die in one request


class RecordingCluster(RpcCluster):
    """Remembers what prefills found, so that their answers can be replayed."""

    log: list[tuple[PrefillJob, PrefillResult]]

    async def prefill(self, worker: str, job: PrefillJob, *, timeout_s: float) -> PrefillResult:
        result = await super().prefill(worker, job, timeout_s=timeout_s)
        self.log.append((job, result))
        return result


@dataclass
class World:
    live: Pools
    mortals: Mortals
    cluster: RecordingCluster
    pipeline: Pipeline
    seeds: list[int] = field(default_factory=lambda: list(range(900, 2000)))
    numbers: Iterator[int] = field(default_factory=itertools.count)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with pools(tmp_path_factory.mktemp("deaths"), lease_s=2.0) as live:
        mortals = Mortals(live)
        store = {"model_dir": str(TINY), "block_tokens": BLOCK_TOKENS, "host_bytes": 8 * 2**20}
        patient = engine_table(
            deterministic_cut_tokens=CUT, store={"call_deadline_s": 10.0, "transfer_deadline_s": 20.0}
        )
        await live.start("store-0", STORE, **store)
        async with asyncio.TaskGroup() as group:
            for worker in WORKERS:
                module = DECODE if worker.startswith("decode") else PREFILL
                group.create_task(mortals.start(worker, module, engine=patient))
        view = ClusterView(live.registry, lease_s=2.0, refresh_s=0.05)
        cluster = RecordingCluster(view, token=TOKEN, router_id="router-0")
        await cluster.start()
        ledger = InFlightLedger()
        limits = PipelineLimits(replacement_wait_s=30.0)
        yield World(live, mortals, cluster, Pipeline(cluster, Placer(cluster, ledger), ledger, limits))
        await cluster.close()
        await mortals.end()


async def generate(
    world: World, tokens: np.ndarray, *, exact: bool = False, deterministic: bool = False
) -> tuple[list[int], Trail]:
    """A request's whole output; offsets are checked."""
    world.cluster.log = []
    trail = Trail(0.0)
    request = GenerateRequest(
        request_id=f"r{next(world.numbers)}",
        tokens=token_ids(tokens),
        tenant_key=TENANT,
        sampling=greedy(OUTPUT),
        deadline_at=asyncio.get_running_loop().time() + 120,
        exact=exact,
        deterministic=deterministic,
    )
    output: list[int] = []
    async with aclosing(world.pipeline.generate(request, trail)) as chunks:
        async for chunk in chunks:
            assert chunk.offset == len(output)
            output += chunk.tokens
    return output, trail


def replayed(world: World, tokens: np.ndarray, *, exact: bool) -> list[int]:
    """What one model writes that has the same hits: each prefill of the log goes on from the tokens before it."""
    reference = Reference(tiny("f32q"), len(tokens) + OUTPUT)
    # A worker that died before it answered has left its blocks in the store
    reference.prefill(tokens, exact=exact)
    output: list[int] = []
    starts = [len(job.tokens) - len(tokens) for job, _ in world.cluster.log]
    for start, (_, result) in zip(starts, world.cluster.log, strict=True):
        known = np.concatenate([tokens, np.array(output[:start], dtype=np.int64)])
        hit = 0 if exact else result.cached_tokens
        output = output[:start] + reference.greedy(known, OUTPUT - start, hit=hit, exact=exact)
    return output


async def check(world: World, *dooms: Doom, exact: bool) -> Trail:
    """A request under which workers die as told ends as if nothing had happened."""
    await world.mortals.revive()
    tokens = prompt(PROMPT, world.seeds.pop(0))
    world.mortals.reaper.send(*dooms)
    output, trail = await generate(world, tokens, exact=exact)
    assert world.mortals.reaper.pending() == 0, "nobody died"
    await world.mortals.expect_deaths(len(dooms))
    assert output == replayed(world, tokens, exact=exact)
    alive = [worker for worker in WORKERS if worker not in world.mortals.dead()]
    await world.live.assert_conserved(*alive, within_s=20.0)
    return trail


BOUNDARY = BLOCK_TOKENS - PROMPT % BLOCK_TOKENS  # output tokens that fill the prompt's open block


@pytest.mark.parametrize(
    ("point", "token", "exact"),
    [
        pytest.param("drawn", 0, True, marks=pytest.mark.slow),
        pytest.param("drawn", 0, False, marks=pytest.mark.slow),
        pytest.param("published", 0, True, marks=pytest.mark.slow),
        pytest.param("published", 5, True, marks=pytest.mark.slow),
        pytest.param("published", 5, False),
        *(
            pytest.param(point, BOUNDARY + 8 + step, exact, marks=pytest.mark.slow)
            for point in ("drawn", "published", "mid_step")
            for step in (-1, 0, 1)
            for exact in (True, False)
        ),
        pytest.param("mid_step", 1, True, marks=pytest.mark.slow),
        pytest.param("mid_step", 17, True),
        pytest.param("published", OUTPUT - 1, True, marks=pytest.mark.slow),
    ],
)
async def test_a_stream_goes_on_after_its_decode_worker_died(
    world: World, point: str, token: int, exact: bool
) -> None:
    trail = await check(world, Doom("decode", point, token), exact=exact)
    told_its_end = (point, token) == (
        "published",
        OUTPUT - 1,
    )  # the last chunk may have left before its worker
    assert trail.resumes + trail.retries in ((0, 1) if told_its_end else (1,))


def alone(tokens: np.ndarray) -> list[int]:
    """The deterministic answer of a pair of workers that never answered anything else."""
    cuts = {"deterministic_cut_tokens": CUT}
    bench = DecodeBench(PrefillBench(**cuts), **cuts)  # type: ignore[arg-type]
    try:
        return bench.generate(tokens, greedy(OUTPUT), deterministic=True)
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("point", "token"),
    [pytest.param("drawn", 0, marks=pytest.mark.slow), ("mid_step", 17)],  # no step runs for the first token
)
async def test_a_deterministic_answer_is_the_same_whoever_died_and_whatever_is_cached(
    world: World, point: str, token: int
) -> None:
    """Cold with a death, then warm beside others, by whichever workers are there: as one pair alone answers."""
    await world.mortals.revive()
    tokens = prompt(PROMPT, world.seeds.pop(0))
    wanted = alone(tokens)
    world.mortals.reaper.send(Doom("decode", point, token))
    output, trail = await generate(world, tokens, deterministic=True)
    assert (output, trail.resumes + trail.retries) == (wanted, 1)
    assert world.mortals.reaper.pending() == 0, "nobody died"
    await world.mortals.expect_deaths(1)
    async with asyncio.TaskGroup() as group:
        warm = group.create_task(generate(world, tokens, deterministic=True))
        for _ in range(3):
            group.create_task(generate(world, prompt(PROMPT, world.seeds.pop(0))))
    assert warm.result()[0] == wanted
    assert warm.result()[1].cached_tokens == CUT
    alive = [worker for worker in WORKERS if worker not in world.mortals.dead()]
    await world.live.assert_conserved(*alive, within_s=20.0)


async def test_a_stream_goes_on_after_two_decode_workers_died(world: World) -> None:
    dooms = Doom("decode", "mid_step", 6), Doom("decode", "published", 13)
    trail = await check(world, *dooms, exact=False)
    assert trail.resumes == 2


async def test_a_prefill_worker_that_died_before_the_hand_off_costs_one_retry(world: World) -> None:
    trail = await check(world, Doom("prefill", "hand_off"), exact=False)
    assert (trail.retries, trail.resumes) == (1, 0)
