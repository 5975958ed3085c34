"""Blocks through a store: offered, found, lent, read over NIXL, kept on disk; what is refused and what is let go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from epdserve.services.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store_types import CacheTier, FetchRequest, OffloadBlock, OffloadRequest, TierRun
from epdserve.services.types import BlockRef
from support.store import Stage, fetch, offload, role_table, stage, taken, taken_results
from support.store_worker import CALL_S, OTHER, OTHER_ROOT, OWNER, PAYLOAD, FakeWorker, chain, name
from support.valkey import url_of, valkey_server
from support.waiting import until

HOST, SSD = CacheTier.HOST, CacheTier.SSD


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey_server() as server:
        yield url_of(server)


@pytest.fixture
async def scene(tmp_path: Path, redis_url: str) -> AsyncIterator[Stage]:
    async with stage(tmp_path, redis_url) as started:
        yield started


@pytest.fixture
async def worker(scene: Stage) -> FakeWorker:
    return await scene.worker()


async def locate(scene: Stage, hashes: tuple[bytes, ...], **more: bool) -> list[tuple[str, int]]:
    runs = await (await scene.client()).locate(hashes, deadline_s=CALL_S, **more)
    return [(str(run.tier), run.blocks) for run in runs]


async def test_what_one_worker_offers_another_reads(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table())
    reader = await scene.worker("decode-0")
    client, hashes = await scene.client(), chain("a", 20)
    assert await offload(client, worker.offer(hashes)) == taken_results(20)
    assert await offload(client, worker.offer(hashes)) == ["held"] * 20
    assert await taken(scene, reader, hashes) == ["host"] * 20
    assert await taken(scene, reader, (*hashes, name("none"))) == ["host"] * 20
    assert await taken(scene, reader, (name("none"), *hashes)) == []
    assert await taken(scene, reader, hashes, max_blocks=3) == ["host"] * 3
    assert await locate(scene, (*hashes, name("none"))) == [("host", 20)]
    assert await scene.metric("store-0", 'epdserve_store_offloaded_blocks_total{result="held"}') == 20
    assert await scene.metric("store-0", 'epdserve_store_fetched_blocks_total{tier="host"}') == 43


async def test_blocks_reach_the_disk_and_outlive_the_store(
    scene: Stage, worker: FakeWorker, tmp_path: Path
) -> None:
    table = role_table(tmp_path / "ssd", blocks=16)
    await scene.store(**table)
    hashes = chain("a", 40)  # more than memory holds
    for start in range(0, 40, 8):
        offer = worker.offer(hashes[start : start + 8])
        first = offer.blocks[0]
        blocks = (replace(first, parent=hashes[start - 1] if start else None), *offer.blocks[1:])
        assert await offload(await scene.client(), replace(offer, blocks=blocks)) == taken_results(8)
        saver = scene.parts().saver
        await until(lambda s=saver: not s.unsaved)  # type: ignore[misc]
    assert set(await taken(scene, worker, hashes[:8])) == {"ssd"}
    assert await taken(scene, worker, hashes[:8]) == ["host"] * 8
    assert await offload(await scene.client(), worker.offer(hashes[30:])) == ["held"] * 10
    await scene.end("store-0")
    await scene.store(**table)
    assert await locate(scene, hashes) == [("ssd", 40)]
    for start in range(0, 40, 10):
        part = hashes[start : start + 10]
        tiers = await taken(scene, worker, part, parent=hashes[start - 1] if start else None)
        assert set(tiers) == {"ssd"}
    runs = await (await scene.client()).locate(hashes, deadline_s=CALL_S)
    assert sum(run.blocks for run in runs) == 40
    assert {run.tier for run in runs} == {HOST, SSD}
    assert TierRun(HOST, 10) in runs


async def test_one_chain_may_lie_in_several_tiers(scene: Stage, worker: FakeWorker, tmp_path: Path) -> None:
    await scene.store(**role_table(tmp_path / "ssd", blocks=24))
    hashes, client = chain("a", 16), await scene.client()
    await offload(client, worker.offer(hashes))
    memory, saver = scene.parts().memory, scene.parts().saver
    await until(lambda: not saver.unsaved)
    assert memory.cache.delete(hashes[4:9]) == 5
    assert await locate(scene, hashes) == [("host", 4), ("ssd", 5), ("host", 7)]
    assert await taken(scene, worker, hashes) == ["host"] * 4 + ["ssd"] * 5 + ["host"] * 7
    memory.cache.delete(hashes)
    # two readers of one chain share the way from the disk
    tiers = await asyncio.gather(fetch(client, hashes), fetch(client, hashes))
    for blocks, lease in tiers:
        assert len(blocks) == 16
        info = await scene.info("store-0")
        assert info is not None
        assert await client.end_fetch(lease, incarnation=info.incarnation, deadline_s=CALL_S)
    hits = await scene.metric("store-0", 'epdserve_kvstore_ssd_blocks_total{result="hit"}')
    assert hits == 5 + 16


async def test_only_whole_blocks_that_were_promised_are_taken(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table())
    client, hashes = await scene.client(), chain("a", 6)
    offer = worker.offer(hashes)
    worker.page_of[1][17] ^= 1  # torn
    worker.fill(2, name("recycled"))  # another valid block has the page now
    worker.page_of[3][PAYLOAD + 40] ^= 1  # the header's reserved bytes
    missing = replace(offer.blocks[4], ref=replace(offer.blocks[4].ref, page=10_000))
    offer = replace(offer, blocks=(*offer.blocks[:4], missing, offer.blocks[5]))
    wanted = ["taken", "refused", "refused", "refused", "refused", "taken"]
    assert await offload(client, offer) == wanted
    assert await locate(scene, hashes) == [("host", 1)]
    assert await locate(scene, (name("recycled"),)) == []
    corrupt = 'epdserve_store_offloaded_blocks_total{result="corrupt"}'
    assert await scene.metric("store-0", corrupt) == 3
    assert await scene.metric("store-0", corrupt.replace("corrupt", "misfit")) == 1
    assert await offload(client, worker.offer(hashes)) == ["held", *taken_results(4), "held"]


async def test_bad_offers_are_errors(scene: Stage, worker: FakeWorker) -> None:
    info = await scene.store(**role_table())
    client, offer = await scene.client(), worker.offer(chain("a", 2))
    with pytest.raises(InvalidRequest, match="twice"):
        await offload(client, replace(offer, blocks=(offer.blocks[0], offer.blocks[0])))
    with pytest.raises(WorkerLost):
        await offload(client, replace(offer, worker="nobody-7"))
    with pytest.raises(WorkerLost):
        await offload(client, replace(offer, incarnation="0000000000000001-00000000"))
    short = OffloadBlock(BlockRef(0, 1, b"short", 0, True), None)
    with pytest.raises(InvalidRequest, match="hash"):
        await offload(client, replace(offer, blocks=(short,)))
    assert await offload(client, OffloadRequest(worker.worker, worker.incarnation, OWNER, ())) == []
    async with StoreClient(info.address, token="not-the-cluster-token") as stranger:
        with pytest.raises(Unauthenticated):
            await stranger.describe(deadline_s=CALL_S)


async def test_exact_readers_get_exact_blocks_only(scene: Stage, worker: FakeWorker, tmp_path: Path) -> None:
    await scene.store(**role_table(tmp_path / "ssd"))
    client, hashes = await scene.client(), chain("a", 4)
    await offload(client, worker.offer(hashes[:2]))
    await offload(client, worker.offer(hashes[2:], exact=False))
    assert await taken(scene, worker, hashes) == ["host"] * 4
    assert await taken(scene, worker, hashes, exact=True) == ["host"] * 2
    assert await locate(scene, hashes, exact=True) == [("host", 2)]
    # an exact one takes a tainted one's place, the other way round nothing happens
    assert await offload(client, worker.offer(hashes[2:], exact=True)) == taken_results(2)
    assert await offload(client, worker.offer(hashes, exact=False)) == ["held"] * 4
    assert await taken(scene, worker, hashes, exact=True) == ["host"] * 4
    scene.parts().memory.cache.delete(hashes)
    saver = scene.parts().saver
    await until(lambda: not saver.unsaved)
    assert await taken(scene, worker, hashes, exact=True) == ["ssd"] * 4


async def test_a_lease_holds_until_its_end_or_its_time(scene: Stage, worker: FakeWorker) -> None:
    info = await scene.store(**role_table(blocks=8, lease_ttl_s=0.3))
    client, hashes = await scene.client(), chain("a", 8)
    await offload(client, worker.offer(hashes))
    blocks, lease = await fetch(client, hashes)
    assert len(blocks) == 8
    # everything is lent: there is room for nothing
    assert await offload(client, worker.offer(chain("b", 2))) == ["refused"] * 2
    other_life = "0000000000000001-00000000"
    assert not await client.end_fetch(lease, incarnation=other_life, deadline_s=CALL_S)
    assert await client.end_fetch(lease, incarnation=info.incarnation, deadline_s=CALL_S)
    assert not await client.end_fetch(lease, incarnation=info.incarnation, deadline_s=CALL_S)
    assert not await client.end_fetch("nonsense", incarnation=info.incarnation, deadline_s=CALL_S)
    assert await offload(client, worker.offer(chain("b", 2))) == taken_results(2)
    request = FetchRequest(OWNER, hashes[:2])
    async for batch in client.fetch(request, deadline_s=0.2):
        lease = batch.lease
    memory = scene.parts().memory
    await until(lambda: memory.cache.pinned() == 0)  # by the clock
    assert not await client.end_fetch(lease, incarnation=info.incarnation, deadline_s=CALL_S)


async def test_a_caller_that_goes_away_leaves_nothing_lent(
    scene: Stage, worker: FakeWorker, tmp_path: Path
) -> None:
    await scene.store(**role_table(tmp_path / "ssd", batch_blocks=2))
    client, hashes = await scene.client(), chain("a", 16)
    await offload(client, worker.offer(hashes))
    saver = scene.parts().saver
    await until(lambda: not saver.unsaved)
    memory = scene.parts().memory
    memory.cache.delete(hashes)
    began = asyncio.get_running_loop().time()
    batches = client.fetch(FetchRequest(OWNER, hashes), deadline_s=CALL_S)
    async for batch in batches:
        assert len(batch.blocks) == 2
        break
    await batches.aclose()
    await until(lambda: memory.leases.counts().held == 0 and memory.cache.pinned() == 0, timeout_s=2.0)
    assert asyncio.get_running_loop().time() - began < 2.0
    assert await scene.metric("store-0", 'epdserve_store_fetches_total{reason="cancelled"}') == 1


async def test_bounds_refuse_instead_of_queueing(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table(max_offload_blocks=3, max_fetches=1))
    client, hashes = await scene.client(), chain("a", 8)
    assert await offload(client, worker.offer(hashes)) == [*taken_results(3), *["refused"] * 5]
    assert await scene.metric("store-0", 'epdserve_store_offloaded_blocks_total{result="busy"}') == 5
    fetches = scene.parts().fetches
    fetches.running = 1
    with pytest.raises(Overloaded) as refused:
        await fetch(client, hashes)
    fetches.running = 0
    assert refused.value.retry_after_s
    assert await scene.metric("store-0", 'epdserve_store_refused_calls_total{call="fetch"}') == 1


async def test_a_worker_that_does_not_answer_costs_its_deadline_only(
    scene: Stage, worker: FakeWorker
) -> None:
    await scene.store(**role_table())
    client, offer = await scene.client(), worker.offer(chain("a", 4))
    assert worker.server is not None
    await worker.server.stop(grace_s=0.0)
    began = asyncio.get_running_loop().time()
    with pytest.raises((WorkerLost, DeadlineExceeded)):
        await client.offload(offer, deadline_s=0.3)
    assert asyncio.get_running_loop().time() - began < 2.0
    worker.server = None


async def test_a_fetch_that_waits_too_long_ends_with_what_there_is(
    scene: Stage, worker: FakeWorker, tmp_path: Path
) -> None:
    await scene.store(**role_table(tmp_path / "ssd"))
    client, hashes = await scene.client(), chain("a", 8)
    await offload(client, worker.offer(hashes))
    saver = scene.parts().saver
    await until(lambda: not saver.unsaved)
    memory, fetches = scene.parts().memory, scene.parts().fetches
    memory.cache.delete(hashes[4:])
    slow = asyncio.Event()
    from_disk = fetches._from_disk

    async def held_up(*args: object) -> object:
        await slow.wait()
        return await from_disk(*args)

    fetches._from_disk = held_up
    blocks, lease = await fetch(client, hashes, max_wait_s=0.2)
    assert len(blocks) == 4
    info = await scene.info("store-0")
    assert info is not None
    assert await client.end_fetch(lease, incarnation=info.incarnation, deadline_s=CALL_S)
    slow.set()  # what comes late is let go
    await until(lambda: memory.cache.held(hashes) == [True] * 8 and memory.cache.pinned() == 0)
    assert await scene.metric("store-0", 'epdserve_store_fetches_total{reason="time"}') == 1


async def test_a_reader_that_got_wrong_bytes_has_them_looked_at(scene: Stage, worker: FakeWorker) -> None:
    info = await scene.store(**role_table())
    client, hashes = await scene.client(), chain("a", 4)
    await offload(client, worker.offer(hashes))
    blocks, lease = await fetch(client, hashes)
    memory = scene.parts().memory
    memory.block_slots._pages[blocks[2].ref.page, 5] ^= 1  # a bit flips in memory
    assert await client.end_fetch(
        lease, incarnation=info.incarnation, suspects=hashes[1:3], deadline_s=CALL_S
    )
    assert await locate(scene, hashes) == [("host", 2)]
    assert await scene.metric("store-0", 'epdserve_store_suspect_blocks_total{verdict="corrupt"}') == 1
    assert await scene.metric("store-0", 'epdserve_store_suspect_blocks_total{verdict="sound"}') == 1


async def test_tenants_and_models_are_deleted_in_memory_and_on_disk(
    scene: Stage, worker: FakeWorker, tmp_path: Path
) -> None:
    await scene.store(**role_table(tmp_path / "ssd"))
    client = await scene.client()
    mine, theirs, old = chain("m", 4), chain("t", 4), chain("o", 4)
    for hashes, owner in ((mine, OWNER), (theirs, OTHER), (old, OTHER_ROOT)):
        assert await offload(client, worker.offer(hashes, owner=owner)) == taken_results(4)
    saver = scene.parts().saver
    await until(lambda: not saver.unsaved)
    deleted = await client.delete_root(OTHER_ROOT.root, deadline_s=CALL_S)
    assert (deleted.host_blocks, deleted.ssd_blocks) == (4, 4)
    assert [await locate(scene, hashes) for hashes in (mine, theirs, old)] == [[("host", 4)]] * 2 + [[]]
    deleted = await client.delete_tenant(OWNER.tenant, deadline_s=CALL_S)
    assert (deleted.host_blocks, deleted.ssd_blocks) == (4, 4)
    assert [await locate(scene, hashes) for hashes in (mine, theirs)] == [[], [("host", 4)]]
    scene.parts().memory.tier.check(deep=True)
    with pytest.raises(InvalidRequest):
        await client.delete_tenant(b"short", deadline_s=CALL_S)
    with pytest.raises(InvalidRequest):
        await client.delete_root(b"", deadline_s=CALL_S)


async def test_a_deletion_that_misses_a_failed_drive_says_so_and_deletes_the_rest(
    scene: Stage, worker: FakeWorker, tmp_path: Path
) -> None:
    await scene.store(**role_table(tmp_path / "ssd"))
    client, hashes = await scene.client(), chain("m", 4)
    assert await offload(client, worker.offer(hashes)) == taken_results(4)
    parts = scene.parts()
    await until(lambda: not parts.saver.unsaved)
    core = parts.memory.tier._core
    core.fail(core.inventory.directories[0], "read", OSError("a test says so"))
    with pytest.raises(Unavailable, match="traces"):
        await client.delete_tenant(OWNER.tenant, deadline_s=CALL_S)
    assert await locate(scene, hashes) == []


async def test_blocks_used_elsewhere_do_not_grow_old_on_disk(
    scene: Stage, worker: FakeWorker, tmp_path: Path
) -> None:
    await scene.store(**role_table(tmp_path / "ssd"))
    client, hashes = await scene.client(), chain("a", 3)
    await offload(client, worker.offer(hashes))
    service = scene.parts()
    await until(lambda: not service.saver.unsaved)
    (directory,) = service.memory.tier._core.inventory.directories
    directory.last_use[:] -= 5000
    await client.touch((hashes[1], name("none")), deadline_s=CALL_S)
    used = sorted(directory.last_use[directory.live()].tolist())
    assert used[2] - used[0] >= 4999
    assert used[1] == used[0]
    assert await taken(scene, worker, hashes) == ["host"] * 3  # a hit in memory is a use as well
    used = directory.last_use[directory.live()].tolist()
    assert max(used) - min(used) <= 1


async def test_a_full_disk_keeps_blocks_in_memory_only(
    scene: Stage, worker: FakeWorker, tmp_path: Path
) -> None:
    table = role_table(tmp_path / "ssd")
    table["ssd"]["directories"][0]["capacity_bytes"] = 4 * 8192
    await scene.store(**table)
    client, hashes = await scene.client(), chain("a", 12)
    assert await offload(client, worker.offer(hashes)) == taken_results(12)
    saver = scene.parts().saver
    await until(lambda: not saver.unsaved)
    assert await taken(scene, worker, hashes) == ["host"] * 12
    assert await scene.metric("store-0", 'epdserve_kvstore_ssd_puts_total{result="accepted"}') <= 4
    # offered again, they are held, and offered to the disk again
    assert await offload(client, worker.offer(hashes)) == ["held"] * 12
