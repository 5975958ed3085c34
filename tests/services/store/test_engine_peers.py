"""Workers with a model on two machines: one has no store, the other's store borrows from its pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from support.engine import BLOCK_TOKENS
from support.golden import TINY
from support.pools import PREFILL, Pools, engine_table, pools
from support.store_process import MODULE

PROMPT = np.random.default_rng(5).integers(0, 200, 20 * BLOCK_TOKENS + 3)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Pools]:
    async with pools(tmp_path, refresh_s=0.05) as started:
        yield started


async def start(cluster: Pools, worker: str, module: str, machine: str, **role: object) -> None:
    original = cluster.pool
    cluster.pool = original.model_copy(update={"machine": machine})
    await cluster.start(worker, module, **role)
    cluster.pool = original


async def test_a_prompt_of_another_machine_is_a_hit_without_any_store_there(cluster: Pools) -> None:
    store = {"model_dir": str(TINY), "block_tokens": BLOCK_TOKENS}
    await start(cluster, "prefill-0", PREFILL, "m0", engine=engine_table())
    await start(cluster, "store-1", MODULE, "m1", **store)
    await start(cluster, "prefill-1", PREFILL, "m1", engine=engine_table())
    first = await cluster.prefill("prefill-0", PROMPT)
    assert first.cached_tokens == 0
    async with asyncio.timeout(20):
        while await cluster.metric("store-1", "epdserve_store_neighbour_blocks") < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    second = await cluster.prefill("prefill-1", PROMPT)
    assert second.cached_tokens == 20 * BLOCK_TOKENS
    assert await cluster.metric("store-1", 'epdserve_store_fetched_blocks_total{tier="peer"}') == 20
    hashes = [[block.block_hash for block in result.handle.blocks] for result in (first, second)]
    sums = [[block.checksum for block in result.handle.blocks[:20]] for result in (first, second)]
    assert hashes[0] == hashes[1]
    assert sums[0] == sums[1]
    for result, worker in ((first, "prefill-0"), (second, "prefill-1")):
        client = await cluster.client(worker)
        assert await client.release_lease(
            result.handle.lease, incarnation=result.handle.incarnation, deadline_s=5
        )
    await cluster.assert_conserved("prefill-0", "prefill-1")
