"""Two stores with different machine names: blocks of one are found through the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from epdserve.services.store_types import CacheTier, FetchRequest
from support.store import Stage, fetch, offload, role_table, stage, taken
from support.store_worker import CALL_S, OTHER_ROOT, OWNER, FakeWorker, chain
from support.valkey import url_of, valkey_server
from support.waiting import until


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey_server() as server:
        yield url_of(server)


@pytest.fixture
async def scene(tmp_path: Path, redis_url: str) -> AsyncIterator[Stage]:
    async with stage(tmp_path, redis_url) as started:
        yield started


async def known(scene: Stage, blocks: int, store: str = "store-1") -> None:
    """Wait until a store has heard of so many blocks elsewhere."""
    neighbours = scene.parts(store).neighbours
    await until(lambda: neighbours.known_blocks() == blocks, timeout_s=10)


async def two(scene: Stage, tmp_path: Path, **more: object) -> tuple[FakeWorker, FakeWorker]:
    """Two machines, a worker on each."""
    await scene.store("store-0", machine="m0", **role_table(tmp_path / "s0", **more))
    await scene.store("store-1", machine="m1", **role_table(tmp_path / "s1", **more))
    return await scene.worker("prefill-0", machine="m0"), await scene.worker("decode-1", machine="m1")


async def test_blocks_of_another_machine_are_pulled_kept_and_saved(scene: Stage, tmp_path: Path) -> None:
    writer, reader = await two(scene, tmp_path)
    hashes = chain("a", 20)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await known(scene, 20)
    client = await scene.client("store-1")
    (run,) = await client.locate(hashes, deadline_s=CALL_S)
    assert (run.tier, run.blocks) == (CacheTier.PEER, 20)
    assert await client.locate(hashes, local_only=True, deadline_s=CALL_S) == ()
    assert await taken(scene, reader, hashes, "store-1", local_only=True) == []
    assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 20
    assert await taken(scene, reader, hashes, "store-1") == ["host"] * 20
    service = scene.parts("store-1")
    await until(lambda: not service.saver.unsaved)
    assert sum(service.memory.tier.stored(list(hashes))) == 20
    assert await scene.metric("store-1", 'epdserve_store_peer_blocks_total{outcome="done"}') == 20
    # a chain that begins here and goes on elsewhere
    service.memory.cache.delete(hashes[10:])
    service.memory.tier.delete_tenant(OWNER.tenant)
    assert await taken(scene, reader, hashes, "store-1") == ["host"] * 10 + ["peer"] * 10


async def test_a_peer_reads_its_disk_for_us(scene: Stage, tmp_path: Path) -> None:
    writer, reader = await two(scene, tmp_path, keep_pulled=False)
    hashes = chain("a", 12)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    owner = scene.parts("store-0")
    await until(lambda: not owner.saver.unsaved)
    owner.memory.cache.delete(hashes)
    await known(scene, 12)
    assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 12
    assert sum(scene.parts("store-1").memory.tier.stored(list(hashes))) == 0


async def test_a_block_that_has_gone_is_a_miss_and_leaves_the_index(scene: Stage, tmp_path: Path) -> None:
    writer, reader = await two(scene, tmp_path)
    hashes = chain("a", 6)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await known(scene, 6)
    owner = scene.parts("store-0")
    await until(lambda: not owner.saver.unsaved)
    feed = owner.feed
    feed.poll = lambda: None  # the news is held up
    owner.memory.cache.delete(hashes[3:])
    owner.memory.tier.delete_tenant(OWNER.tenant)
    assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 3
    del feed.poll
    await known(scene, 3)


async def test_wrong_bytes_of_a_peer_are_never_taken(scene: Stage, tmp_path: Path) -> None:
    writer, reader = await two(scene, tmp_path)
    hashes = chain("a", 6)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await known(scene, 6)
    owner = scene.parts("store-0")
    pinned = owner.memory.cache.match(list(hashes))
    owner.memory.block_slots._pages[pinned[2].slot.index, 11] ^= 1
    owner.memory.cache.release(pinned)
    assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 2
    assert await scene.metric("store-1", 'epdserve_store_peer_blocks_total{outcome="corrupt"}') >= 1


async def test_a_lease_that_did_not_hold_spoils_what_was_read(scene: Stage, tmp_path: Path) -> None:
    writer, _ = await two(scene, tmp_path)
    hashes = chain("a", 6)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await known(scene, 6)
    service = scene.runners["store-0"]._service
    assert service is not None
    end_fetch = service.end_fetch

    async def lost(lease: str, **more: object) -> bool:
        await end_fetch(lease, **more)
        return False

    service.end_fetch = lost
    blocks, _ = await fetch(await scene.client("store-1"), hashes)
    assert blocks == []
    assert await scene.metric("store-1", 'epdserve_store_peer_blocks_total{outcome="lease_lost"}') == 6


async def test_a_peer_that_left_or_lives_anew_is_forgotten(scene: Stage, tmp_path: Path) -> None:
    writer, reader = await two(scene, tmp_path, peer_deadline_s=1.0)
    hashes = chain("a", 6)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await known(scene, 6)
    owner = scene.parts("store-0")
    await until(lambda: not owner.saver.unsaved)
    await scene.end("store-0")
    await known(scene, 0)
    assert await taken(scene, reader, hashes, "store-1") == []
    await scene.store("store-0", machine="m0", **role_table(tmp_path / "s0"))
    await known(scene, 6)  # its disk has them
    assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 6


async def test_stores_of_one_machine_and_blocks_of_other_roots_are_no_peers(
    scene: Stage, tmp_path: Path
) -> None:
    await scene.store("store-0", machine="m0", **role_table())
    await scene.store("store-1", machine="m0", **role_table())
    writer = await scene.worker("prefill-0", machine="m0")
    await offload(await scene.client("store-0"), writer.offer(chain("a", 3)))
    await scene.store("store-2", machine="m1", **role_table())
    await known(scene, 3, "store-2")
    await asyncio.sleep(0.3)
    assert scene.parts("store-1").neighbours.watched == 1  # store-2 alone
    assert await taken(scene, writer, chain("a", 3), "store-1") == []
    assert await taken(scene, writer, chain("other", 3), "store-2", owner=OTHER_ROOT) == []


async def test_a_peer_that_hangs_costs_its_deadline_only(scene: Stage, tmp_path: Path) -> None:
    writer, _ = await two(scene, tmp_path, peer_deadline_s=0.4)
    hashes = chain("a", 6)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await known(scene, 6)
    owner = scene.parts("store-0")

    async def hang(*_: object, **__: object) -> object:
        await asyncio.sleep(30)

    owner.fetches._bring = hang
    began = asyncio.get_running_loop().time()
    blocks, _ = await fetch(await scene.client("store-1"), hashes)
    assert blocks == []
    assert asyncio.get_running_loop().time() - began < 3.0
    for task in list(owner.fetches._tasks._running):
        task.cancel()


async def test_a_fetch_from_peers_ends_where_memory_ends(scene: Stage, tmp_path: Path) -> None:
    await scene.store("store-0", machine="m0", **role_table())
    await scene.store("store-1", machine="m1", **role_table(blocks=10))
    writer, reader = await scene.worker("prefill-0"), await scene.worker("decode-1", machine="m1")
    hashes = chain("a", 20)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await known(scene, 20)
    assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 10
    request = FetchRequest(OWNER, hashes[10:], parent=hashes[9])
    client = await scene.client("store-1")
    async for batch in client.fetch(request, deadline_s=CALL_S):
        lease = batch.lease
    assert await client.end_fetch(lease, incarnation=batch.incarnation, deadline_s=CALL_S)


async def test_what_was_deleted_does_not_come_back_from_a_neighbour(scene: Stage, tmp_path: Path) -> None:
    writer, reader = await two(scene, tmp_path)
    hashes, others = chain("a", 4), chain("b", 4)
    await offload(await scene.client("store-0"), writer.offer(hashes))
    await offload(await scene.client("store-0"), writer.offer(others, owner=OTHER_ROOT))
    await known(scene, 8)
    client = await scene.client("store-1")
    await client.delete_root(OWNER.root, deadline_s=CALL_S)
    assert await taken(scene, reader, hashes, "store-1") == []
    assert await taken(scene, reader, others, "store-1", owner=OTHER_ROOT) == ["peer"] * 4


async def test_blocks_in_pages_of_another_machines_worker_are_borrowed(scene: Stage) -> None:
    hashes = chain("a", 12)
    for worker, keeps_promises in (("prefill-0", True), ("prefill-9", False)):
        lender = await scene.worker(worker, machine="m0")
        lender.keeps_promises = keeps_promises
        for page, block_hash in enumerate(hashes if keeps_promises else chain("b", 12)):
            lender.lends[block_hash] = lender.fill(page, block_hash)
        scene.workers[worker] = (lender, "m0")
    await scene.store("store-1", machine="m1", **role_table())
    reader = await scene.worker("decode-1", machine="m1")
    await known(scene, 24)
    honest, liar = scene.workers["prefill-0"][0], scene.workers["prefill-9"][0]
    honest.page_of[9][100] ^= 1  # torn since it was announced
    assert await taken(scene, reader, hashes, "store-1") == ["peer"] * 9
    assert await taken(scene, reader, chain("b", 12), "store-1") == []
    assert (honest.loans, liar.loans) == (0, 0)
    for outcome, blocks in (("done", 9), ("corrupt", 2), ("lease_lost", 8)):
        sample = f'epdserve_store_peer_blocks_total{{outcome="{outcome}"}}'
        assert await scene.metric("store-1", sample) == blocks, outcome
