"""Stores as processes of their own: killed, started again, and two machines that have TCP only."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.errors import ServiceError
from epdserve.services.rpc.store_client import StoreClient
from support.store import Stage, fetch, offload, role_table, stage, taken
from support.store_worker import CALL_S, FakeWorker, chain

pytestmark = pytest.mark.integration


async def until_metric(scene: Stage, worker: str, sample: str, least: float) -> None:
    async with asyncio.timeout(20):
        while await scene.metric(worker, sample) < least:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.05)


async def test_two_machines_over_tcp_and_one_store_killed(tmp_path: Path) -> None:
    async with stage(tmp_path, lease_s=1.0) as scene:
        table = role_table(tmp_path / "ssd")
        # over shared memory a reader's death leaves its source alone; the other machine has TCP and nothing else
        first, _, worker, reader = await asyncio.gather(
            scene.spawn("store-0", machine="m0", **table),
            scene.spawn("store-1", machine="m1", env={"UCX_TLS": "tcp,self"}, **role_table()),
            scene.worker("prefill-0", machine="m0"),
            scene.worker("decode-1", machine="m1"),
        )
        old, hashes = await scene.client(), chain("a", 16)
        await offload(old, worker.offer(hashes))
        await until_metric(scene, "store-0", 'epdserve_kvstore_ssd_slots{state="live"}', 16)
        await until_metric(scene, "store-1", "epdserve_store_neighbour_blocks", 16)
        assert await taken(scene, reader, hashes[:8], "store-1") == ["peer"] * 8
        await kill_under_load(scene, worker, table, first.incarnation)
        client = await scene.client()
        runs = await client.locate(hashes, deadline_s=CALL_S)
        assert [(str(run.tier), run.blocks) for run in runs] == [("ssd", 16)]
        assert set(await taken(scene, worker, hashes)) == {"ssd"}
        assert await scene.metric("store-0", "epdserve_kvstore_ssd_slots_missing") == 0
        assert await scene.metric("store-0", "epdserve_store_broken_parts") == 0
        # the other machine finds the new life by itself
        await until_metric(scene, "store-1", "epdserve_store_neighbour_blocks", 16)
        wanted = ["host"] * 8 + ["peer"] * 8
        async with asyncio.timeout(30.0):  # until the new connection stands, a call may miss
            while await taken(scene, reader, hashes, "store-1") != wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.5)


async def kill_under_load(scene: Stage, worker: FakeWorker, table: dict[str, Any], former: str) -> None:
    """SIGKILL a store amid calls and start it again; what the former life lent holds no more."""
    old = await scene.client()
    blocks, lease = await fetch(old, chain("a", 16))
    assert len(blocks) == 16
    stop = asyncio.Event()
    load = asyncio.create_task(_load(old, worker, stop))
    await asyncio.sleep(0.2)
    scene.kill("store-0")
    with pytest.raises(ServiceError):
        await offload(old, worker.offer(chain("a", 2)))
    second = await scene.spawn("store-0", machine="m0", **table)
    assert second.incarnation > former
    stop.set()
    assert await load > 0  # calls that failed cleanly or were answered; none hung
    client = await scene.client()
    assert not await client.end_fetch(lease, incarnation=former, deadline_s=CALL_S)
    assert not await client.end_fetch(lease, incarnation=second.incarnation, deadline_s=CALL_S)


async def _load(client: StoreClient, worker: FakeWorker, stop: asyncio.Event) -> int:
    """Offers and fetches without a pause, whatever becomes of them; how many were made."""
    calls = 0
    while not stop.is_set():
        hashes = chain(f"load{calls}-", 4)
        with contextlib.suppress(ServiceError):
            await offload(client, worker.offer(hashes, first_page=32))
            await fetch(client, hashes)
        calls += 1
        await asyncio.sleep(0.005)
    return calls
