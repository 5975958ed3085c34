"""Stores as processes of their own: killed, started again, and two machines that have TCP only."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from epdserve.services.errors import ServiceError
from support.store import Stage, fetch, offload, role_table, stage, taken
from support.store_worker import CALL_S, chain

pytestmark = pytest.mark.integration


async def until_stored(scene: Stage, blocks: int, worker: str = "store-0") -> None:
    async with asyncio.timeout(20):
        while await scene.metric(worker, 'epdserve_kvstore_ssd_slots{state="live"}') < blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_killed_store_costs_misses_only(tmp_path: Path) -> None:
    async with stage(tmp_path, lease_s=1.0) as scene:
        worker = await scene.worker()
        table = role_table(tmp_path / "ssd")
        first = await scene.spawn("store-0", **table)
        old, hashes = await scene.client(), chain("a", 16)
        await offload(old, worker.offer(hashes))
        await until_stored(scene, 16)
        blocks, lease = await fetch(old, hashes)
        assert len(blocks) == 16
        stop = asyncio.Event()
        load = asyncio.create_task(_load(scene, worker, stop))
        await asyncio.sleep(0.2)
        scene.kill("store-0")
        with pytest.raises(ServiceError):
            await offload(old, worker.offer(hashes[:2]))
        second = await scene.spawn("store-0", **table)
        assert second.incarnation > first.incarnation
        stop.set()
        assert await load > 0  # calls that failed cleanly or were answered; none hung
        client = await scene.client()
        # the former life's lease holds no more, and names nothing here
        assert not await client.end_fetch(lease, incarnation=first.incarnation, deadline_s=CALL_S)
        runs = await client.locate(hashes, deadline_s=CALL_S)
        assert [(str(run.tier), run.blocks) for run in runs] == [("ssd", 16)]
        assert set(await taken(scene, worker, hashes)) == {"ssd"}
        assert await scene.metric("store-0", "epdserve_kvstore_ssd_slots_missing") == 0
        assert await scene.metric("store-0", "epdserve_store_broken_parts") == 0


async def _load(scene: Stage, worker: object, stop: asyncio.Event) -> int:
    """Offers and fetches without a pause, whatever becomes of them; how many were made."""
    calls = 0
    client = await scene.client()
    while not stop.is_set():
        hashes = chain(f"load{calls}-", 4)
        with contextlib.suppress(ServiceError):
            await offload(client, worker.offer(hashes, first_page=32))  # type: ignore[attr-defined]
            await fetch(client, hashes)
        calls += 1
        await asyncio.sleep(0.005)
    return calls


async def test_two_machines_with_tcp_only(tmp_path: Path) -> None:
    tcp = {"UCX_TLS": "tcp,self"}
    async with stage(tmp_path) as scene:
        _, _, writer, reader = await asyncio.gather(
            scene.spawn("store-0", machine="m0", env=tcp, **role_table()),
            scene.spawn("store-1", machine="m1", env=tcp, **role_table()),
            scene.worker("prefill-0", machine="m0"),
            scene.worker("decode-1", machine="m1"),
        )
        hashes = chain("a", 24)
        await offload(await scene.client("store-0"), writer.offer(hashes))
        async with asyncio.timeout(20):
            while await scene.metric("store-1", "epdserve_store_neighbour_blocks") < 24:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 24
