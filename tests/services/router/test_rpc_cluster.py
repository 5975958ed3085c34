"""The pipeline over real gRPC, with workers that have no model and a registry on a real Valkey server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import epdserve.services.router
import pytest
from epdserve.kvstore.hashing import prefix_hash_chain
from epdserve.kvstore.set_digest import set_digest
from epdserve.services.errors import ServiceError, WorkerLost
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.view import ClusterView
from epdserve.services.router.cluster_metrics import ClusterCollector
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.foresight import Foresight
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.metrics import RouterMetrics
from epdserve.services.router.pipeline import Pipeline, PipelineLimits
from epdserve.services.router.policy_metrics import PolicyCollector
from epdserve.services.router.request import GenerateRequest, Trail
from epdserve.services.router.routing import Placer
from epdserve.services.router.rpc_cluster import RpcCluster
from epdserve.services.router.sharing import Sharing
from epdserve.services.router.slo import SloSettings
from epdserve.services.rpc.server import RpcServer, serve_decode, serve_prefill
from epdserve.services.types import (
    BlockUpdate,
    FinishReason,
    SamplingParams,
    WorkerInfo,
    WorkerRole,
    token_ids,
)
from prometheus_client import CollectorRegistry, generate_latest
from redis.asyncio import Redis
from support.fake_decode import TOKEN, FakeDecode, worker_info
from support.fake_prefill import FakePrefill
from support.valkey import url_of, valkey_server
from support.waiting import until

PROMPT = token_ids(range(300))
KEY = b"tenant"


class Prefill(FakePrefill):
    """Holds blocks."""

    def __init__(self, hashes: tuple[bytes, ...] = ()) -> None:
        super().__init__()
        self.hashes = hashes
        self.released: list[str] = []

    async def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        yield BlockUpdate("1", True, 0, 1, self.hashes[:1], ())
        yield BlockUpdate("1", False, 1, len(self.hashes), self.hashes[1:], ())
        await asyncio.Event().wait()

    async def release_lease(self, lease: str, *, incarnation: str) -> bool:
        self.released.append(lease)
        return await super().release_lease(lease, incarnation=incarnation)


@dataclass
class World:
    """Workers, the registry, and a router's view of them."""

    registry: Registry
    cluster: RpcCluster
    infos: dict[str, WorkerInfo] = field(default_factory=dict)
    servers: list[RpcServer] = field(default_factory=list)

    async def tell(self, info: WorkerInfo) -> None:
        self.infos[info.worker] = info
        assert await self.registry.publish(info)
        await until(lambda: info in self.cluster.workers())

    async def add_prefill(self, name: str, handler: FakePrefill, incarnation: str = "1") -> None:
        server = await serve_prefill(handler, token=TOKEN)
        self.servers.append(server)
        fields: dict[str, Any] = {"address": server.address, "incarnation": incarnation}
        await self.tell(worker_info(name, role=WorkerRole.PREFILL, **fields))

    async def add_decode(self, name: str, engine: FakeDecode, incarnation: str = "1") -> RpcServer:
        server = await serve_decode(engine, engine.sessions, token=TOKEN)
        self.servers.append(server)
        await self.tell(worker_info(name, address=server.address, incarnation=incarnation))
        return server


@pytest.fixture(scope="module")
def registry_url() -> Iterator[str]:
    with valkey_server() as server:
        yield url_of(server)


@asynccontextmanager
async def stepping(engine: FakeDecode, step_s: float = 0.002) -> AsyncIterator[FakeDecode]:
    task = asyncio.create_task(engine.run(step_s=step_s))
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def world(registry_url: str, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    namespace = f"t{abs(hash(request.node.name)) % 10**9}"
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(Registry(registry_url, namespace=namespace, lease_s=60))
        view = ClusterView(registry, refresh_s=0.02)
        cluster = RpcCluster(view, token=TOKEN, router_id="router-0")
        await cluster.start()
        world = World(registry, cluster)
        stack.push_async_callback(_stop, world)
        yield world


async def _stop(world: World) -> None:
    await world.cluster.close()
    for server in world.servers:
        await server.stop(grace_s=0)


async def run(world: World, trail: Trail | None = None, max_tokens: int = 20, **limits: Any) -> list[int]:
    ledger = InFlightLedger()
    pipeline = Pipeline(
        world.cluster,
        Placer(world.cluster, ledger),
        ledger,
        PipelineLimits(**{"replacement_wait_s": 5.0, **limits}),
    )
    request = GenerateRequest(
        request_id=f"r{id(trail)}",
        tokens=PROMPT,
        tenant_key=KEY,
        sampling=SamplingParams(seed=1, max_tokens=max_tokens),
        deadline_at=asyncio.get_running_loop().time() + 10,
    )
    tokens: list[int] = []
    async with aclosing(pipeline.generate(request, trail or Trail(0.0))) as chunks:
        async for chunk in chunks:
            assert chunk.offset == len(tokens)
            tokens.extend(chunk.tokens)
            if chunk.finish_reason is not None:
                assert chunk.finish_reason is FinishReason.LENGTH
    return tokens


async def test_a_request_through_real_calls(world: World) -> None:
    prefill = Prefill()
    await world.add_prefill("p0", prefill)
    async with stepping(FakeDecode()) as decode:
        await world.add_decode("d0", decode)
        trail = Trail(0.0)
        assert len(await run(world, trail)) == 20
        assert trail.prefill is not None
        assert trail.decode is not None
        assert prefill.jobs[0].tokens.tolist() == PROMPT.tolist()
        assert 0 < (prefill.deadlines[0] or 0) <= 10


@asynccontextmanager
async def restarted(world: World) -> AsyncIterator[RpcCluster]:
    """A further router that has just started on the same registry."""
    cluster = RpcCluster(ClusterView(world.registry, refresh_s=0.02), token=TOKEN, router_id="router-1")
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.close()


async def test_block_events_steer_placement(world: World) -> None:
    chain = tuple(prefix_hash_chain(PROMPT, block_tokens=128, root=b"root", tenant_key=KEY))
    assert len(chain) == 2
    holder = Prefill(chain)
    await world.add_prefill("p0", Prefill())
    await world.add_prefill("p1", holder)
    async with stepping(FakeDecode()) as decode:
        await world.add_decode("d0", decode)
        await until(lambda: world.cluster.hits(chain) == {"p1": 2})
        await run(world)
        async with restarted(world) as newcomer:
            # No event has to come first: what it knows is there when it has started
            assert newcomer.hits(chain)["p1"] >= 1
            for _ in range(100):
                newcomer.hits(chain)
            assert newcomer.lookups > 100
            assert newcomer.blind_lookups == 0
    assert len(holder.jobs) == 1
    await world.registry.withdraw("p1", "1")
    await until(lambda: world.cluster.hits(chain) == {})


class Drifting(Prefill):
    """Tells less than it holds, until somebody asks again; a liar does so for ever."""

    def __init__(self, hashes: tuple[bytes, ...], *, lies: bool = False) -> None:
        super().__init__(hashes)
        self.snapshots, self.lies = 0, lies

    async def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        self.snapshots += 1
        told = self.hashes if self.snapshots > 1 and not self.lies else self.hashes[:1]
        yield BlockUpdate("1", True, 0, 1, told, ())
        while True:
            yield BlockUpdate("1", False, 1, 1, (), (), set_digest(self.hashes))
            await asyncio.sleep(0.2)


async def test_drift_is_found_by_its_digest_and_healed_within_three_seconds(world: World) -> None:
    chain = tuple(prefix_hash_chain(PROMPT, block_tokens=128, root=b"root", tenant_key=KEY))
    honest, liar = Drifting(chain), Drifting(chain, lies=True)
    await world.add_prefill("p0", honest)
    await world.add_prefill("p1", liar)
    async with asyncio.timeout(3.0):
        await until(lambda: world.cluster.hits(chain).get("p0") == 2)
    assert world.cluster.drifts >= 1
    await until(lambda: liar.snapshots > 2)  # asked again and again, and not often
    assert honest.snapshots == 2
    assert world.cluster.hits(chain)["p1"] == 1


async def test_an_unreachable_prefill_worker_costs_one_retry(world: World) -> None:
    await world.tell(worker_info("p0", role=WorkerRole.PREFILL, address="127.0.0.1:9", incarnation="1"))
    good = Prefill()
    await world.add_prefill("p1", good)
    async with stepping(FakeDecode()) as decode:
        await world.add_decode("d0", decode)
        trail = Trail(0.0)
        assert len(await run(world, trail)) == 20
    assert (trail.retries, trail.lost_workers) == (1, ["p0"])


async def test_a_stream_survives_the_next_life_of_its_decode_worker(world: World) -> None:
    await world.add_prefill("p0", Prefill())
    first, second = FakeDecode(), FakeDecode(incarnation="2")
    trail = Trail(0.0)
    async with stepping(first, 0.01), stepping(second):
        await world.add_decode("d0", first)
        running = asyncio.create_task(run(world, trail, max_tokens=100))
        await until(lambda: any(offset > 5 for _, offset in first.running.values()))
        await world.add_decode("d0", second, incarnation="2")
        assert len(await running) == 100
    assert trail.resumes == 1
    assert second.submitted


async def test_a_worker_that_leaves_the_registry_is_lost(world: World) -> None:
    await world.add_prefill("p0", Prefill())
    async with stepping(FakeDecode(), 0.01) as decode:
        await world.add_decode("d0", decode)
        running = asyncio.create_task(run(world, max_tokens=10_000, replacement_wait_s=0.0))
        await until(lambda: bool(decode.running))
        await world.registry.withdraw("d0", "1")
        with pytest.raises(ServiceError, match="no decode worker is ready"):
            await running
        # by the session's farewell; should a busy machine miss its second, the worker's grace for orphans ends it
        await until(lambda: not decode.running, timeout_s=15.0)


async def test_a_cancelled_request_reaches_the_workers(world: World) -> None:
    prefill = Prefill()
    await world.add_prefill("p0", prefill)
    async with stepping(FakeDecode(), 0.01) as decode:
        await world.add_decode("d0", decode)
        for phase in ("prefill", "decode"):
            prefill.hang = phase == "prefill"
            running = asyncio.create_task(run(world, max_tokens=10_000))
            await until(lambda p=phase: bool(prefill.jobs) if p == "prefill" else bool(decode.running))  # type: ignore[misc]
            running.cancel()
            await asyncio.wait([running])
            if phase == "prefill":
                await until(lambda: prefill.cancelled == 1, timeout_s=0.5)
                # its answer could have been under way
                await until(lambda: prefill.abandoned == [prefill.jobs[0].request_id], timeout_s=0.5)
            else:
                await until(lambda: not decode.running, timeout_s=0.5)


async def test_a_lease_nobody_pulls_is_released(world: World) -> None:
    prefill = Prefill()
    await world.add_prefill("w", prefill)
    decode = FakeDecode()
    await world.add_decode("d0", decode)
    running = asyncio.create_task(run(world))
    await until(lambda: bool(decode.submitted))
    running.cancel()
    await asyncio.wait([running])
    await until(lambda: prefill.released == ["lease"])


async def test_workers_unknown_to_the_view_are_lost(world: World) -> None:
    with pytest.raises(WorkerLost):
        world.cluster.session_of("nobody")


async def test_closing_ends_everything(world: World) -> None:
    await world.add_prefill("p0", Prefill())
    async with stepping(FakeDecode(), 0.01) as decode:
        await world.add_decode("d0", decode)
        running = asyncio.create_task(run(world, max_tokens=10_000, replacement_wait_s=0.0, max_resumes=0))
        await until(lambda: bool(decode.running))
        await world.cluster.close()
        with pytest.raises(ServiceError):
            await running
        await until(lambda: not decode.running)


async def test_every_metric_has_a_row_in_the_readme(world: World) -> None:
    await world.tell(worker_info("p0", role=WorkerRole.PREFILL))
    registry = CollectorRegistry()
    registry.register(ClusterCollector(world.cluster))
    RouterMetrics(registry)
    words = Sharing(
        Redis(), namespace="t", router_id="r", ledger=InFlightLedger(), lengths=Estimates().lengths
    )
    PolicyCollector(Estimates(), Foresight(SloSettings(), Estimates()), words, registry)
    text = generate_latest(registry).decode()
    assert 'epdserve_router_workers{role="prefill",state="ready"} 1.0' in text
    readme = (Path(epdserve.services.router.__path__[0]) / "README.md").read_text()
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, flags=re.MULTILINE):
        if not name.endswith("_created"):
            assert re.search(rf"`{name}[`{{]", readme), f"{name} ({kind})"
