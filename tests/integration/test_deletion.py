"""What an administrator deletes is in no tier of any process afterwards, and what is others' stays (real processes)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
from epdserve.services.pool.view import ClusterView
from epdserve.services.router.app import create_app
from epdserve.services.router.auth import tenant_key
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.rpc_cluster import RpcCluster
from epdserve.services.router.server import administered, bind
from epdserve.services.router.tenancy.admin import HEADER
from epdserve.services.router.tenancy.config import TenancySettings
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.types import DecodeJob, PrefillJob, PrefillResult, TokenSources, token_ids
from support.engine import BLOCK_TOKENS, greedy, prompt
from support.golden import TINY
from support.mortal import Mortals
from support.pools import CALL_S, DECODE, PREFILL, STORE, TOKEN, Pools, engine_table, pools
from support.real_tokenizer import real_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

WORKERS = ("prefill-0", "prefill-1", "decode-0")
PROMPT, ANSWER = 64, 20
FULL = (
    PROMPT + ANSWER - 1 - (PROMPT + ANSWER - 1) % BLOCK_TOKENS
)  # tokens in full blocks; the last one is not run


@dataclass
class World:
    live: Pools
    admin: httpx.AsyncClient
    numbers: list[int]

    async def turn(
        self, tenant: str, worker: str, tokens: np.ndarray, *, exact: bool = True
    ) -> PrefillResult:
        """A prefill and a short answer under a tenant's key; what was sealed is in the store then."""
        name, ids, key = f"r{self.numbers.pop()}", token_ids(tokens), key_of(tenant)
        client = await self.live.client(worker)
        result = await client.run(PrefillJob(name, ids, key, exact), deadline_s=CALL_S)
        job = DecodeJob(
            request_id=name,
            tokens=ids,
            tenant_key=key,
            sampling=greedy(ANSWER),
            handle=result.handle,
            exact=exact,
        )
        await self.live.decode("decode-0", job)
        await self.offered()
        return result

    async def offered(self) -> None:
        """Wait until nothing is on its way to the store."""
        for at in WORKERS:
            async with asyncio.timeout(30):
                while await self.live.metric(at, "epdserve_engine_offload_pending_bytes"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def look(
        self, tenant: str, worker: str, tokens: np.ndarray, *, deterministic: bool = False
    ) -> TokenSources:
        """Where a prompt's tokens come from."""
        name = f"r{self.numbers.pop()}"
        job = PrefillJob(name, token_ids(tokens), key_of(tenant), deterministic=deterministic)
        client = await self.live.client(worker)
        result = await client.run(job, deadline_s=CALL_S)
        handle = result.handle
        assert await client.release_lease(handle.lease, incarnation=handle.incarnation, deadline_s=CALL_S)
        return result.sources

    async def stored(self, result: PrefillResult) -> int:
        """How many of a prompt's blocks the store has, in memory or on disk."""
        info = await self.live.listed("store-0")
        async with StoreClient(info.address, token=TOKEN, worker="store-0") as store:
            hashes = tuple(ref.block_hash for ref in result.handle.blocks)
            return sum(run.blocks for run in await store.locate(hashes, deadline_s=CALL_S))

    async def until_saved(self, blocks: int) -> None:
        async with asyncio.timeout(20):
            while await self.live.metric("store-0", LIVE_SLOTS) < blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


LIVE_SLOTS = 'epdserve_kvstore_ssd_slots{state="live"}'
HELD = ("epdserve_kvstore_host_cache_bytes", "epdserve_kvstore_tail_bytes", LIVE_SLOTS)


def key_of(tenant: str) -> bytes:
    """Of ``name``, or of ``name/salt``."""
    name, _, salt = tenant.partition("/")
    return tenant_key("key", key_name=name, user="", cache_salt=salt)


def router_config(folder: Path, redis_url: str, port: int) -> RouterConfig:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "bob")}
    tenants = [f'[tenants.{name}]\nkeys = ["sha256:{digest}"]' for name, digest in digests.items()]
    (folder / "tenants.toml").write_text("\n".join(tenants))
    return RouterConfig(
        model_dir=Path("unused"),
        model_name="demo",
        isolation="key",
        registry_url=redis_url,
        cluster_token_file=folder / "token",
        tenancy=TenancySettings(tenants_file=folder / "tenants.toml", admin_port=port),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with pools(tmp_path_factory.mktemp("deletion")) as live:
        (live.folder / "token").chmod(0o600)
        mortals = Mortals(live)
        ssd = {"directories": [{"folder": str(live.folder / "ssd"), "capacity_bytes": 2**22}]}
        store = {"model_dir": str(TINY), "block_tokens": BLOCK_TOKENS, "host_bytes": 4 * 2**20, "ssd": ssd}
        engine = engine_table(store={"call_deadline_s": 10.0, "transfer_deadline_s": 20.0})
        await mortals.start("store-0", STORE, **store)
        async with asyncio.TaskGroup() as group:
            for worker in WORKERS:
                module = DECODE if worker.startswith("decode") else PREFILL
                group.create_task(mortals.start(worker, module, engine=engine))
        with bind("127.0.0.1", 0) as probe:
            port = probe.getsockname()[1]
        settings = router_config(live.folder, live.pool.redis_url, port)
        cluster = RpcCluster(ClusterView(live.registry), token=TOKEN, router_id="router-0")
        app = create_app(settings, cluster, tokenizer=real_tokenizer())
        admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={HEADER: "1"}, timeout=30)
        async with app.router.lifespan_context(app), administered(app, settings), admin:
            yield World(live, admin, list(range(1000, 2000)))
        await mortals.end()


async def test_what_an_administrator_deletes_is_in_no_tier(world: World) -> None:
    tokens = prompt(PROMPT, 1)
    hers, his = await world.turn("alice", "prefill-0", tokens), await world.turn("bob", "prefill-0", tokens)
    salted = await world.turn("alice/salt", "prefill-0", tokens)
    await world.until_saved(3 * FULL // BLOCK_TOKENS)
    longer = [np.concatenate([tokens, prompt(9, 100 + number)]) for number in range(4)]
    assert (await world.look("alice", "prefill-0", longer[0])).device == PROMPT
    assert (await world.look("alice", "prefill-1", longer[1])).host == PROMPT
    assert await world.stored(hers) == await world.stored(salted) == PROMPT // BLOCK_TOKENS

    answer = await world.admin.delete("/admin/tenants/alice/data")
    assert answer.json() == {"forgotten": "alice", "workers": 3, "stores": 1, "failed": []}
    for worker in WORKERS:
        samples = await world.live.metrics(worker)
        assert samples['epdserve_kvstore_pages{phase="cached"}'] == 0
        assert samples['epdserve_kvstore_page_cache_evictions_total{reason="deleted"}'] > 0
    assert await world.stored(hers) == await world.stored(salted) == 0
    # under the key of before, which no request of hers has any more
    assert await world.look("alice", "prefill-1", longer[2]) == TokenSources(computed=PROMPT + 9)
    await world.live.assert_conserved(*WORKERS, within_s=20.0)

    assert await world.stored(his) == PROMPT // BLOCK_TOKENS
    assert (await world.look("bob", "prefill-1", longer[3])).host == PROMPT


async def test_a_reset_leaves_nothing_of_anybody(world: World) -> None:
    his = await world.turn("bob", "prefill-0", prompt(PROMPT, 7))
    assert await world.stored(his) == PROMPT // BLOCK_TOKENS
    await world.look("bob", "prefill-0", prompt(PROMPT, 8), deterministic=True)  # under another root
    await world.offered()
    answer = await world.admin.post("/admin/caches/reset")
    assert answer.json() == {"forgotten": "all", "workers": 3, "stores": 1, "failed": []}
    samples = await world.live.metrics("store-0")
    assert {name: samples[name] for name in HELD} == dict.fromkeys(HELD, 0.0)
    for worker in WORKERS:
        assert await world.live.metric(worker, 'epdserve_kvstore_pages{phase="cached"}') == 0
    assert (await world.look("bob", "prefill-1", prompt(PROMPT, 7))).computed == PROMPT
