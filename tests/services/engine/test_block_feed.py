import asyncio
import time
from collections.abc import AsyncIterator

import numpy as np
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.set_digest import set_digest
from epdserve.kvstore.types import BlockHash
from epdserve.services.engine.block_feed import BlockFeed, digest_pause_s
from epdserve.services.types import BlockUpdate

PATIENCE_S = 5.0


def block_hash(n: int) -> BlockHash:
    return BlockHash(n.to_bytes(16, "little"))


def add(blocks: BlockManager, n: int) -> None:
    [page] = blocks.reserve(1)
    blocks.release([blocks.seal(page, block_hash(n), parent=None, exact=True, checksum=n)])


async def take(updates: AsyncIterator[BlockUpdate]) -> BlockUpdate:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(updates)


async def test_snapshot_then_deltas_that_follow_one_another() -> None:
    blocks = BlockManager(8)
    feed = BlockFeed(blocks, "7")
    add(blocks, 1)
    watch = feed.watch()
    first = await take(watch)
    assert (first.snapshot, first.incarnation, set(first.added)) == (True, "7", {block_hash(1)})
    add(blocks, 2)
    feed.poll()
    blocks.abort(blocks.reserve(8))
    feed.poll()
    second, third = await take(watch), await take(watch)
    assert (second.first_seq, second.added, second.removed) == (first.next_seq, (block_hash(2),), ())
    assert third.first_seq == second.next_seq
    assert set(third.removed) == {block_hash(1), block_hash(2)}


async def test_every_listener_gets_everything() -> None:
    blocks = BlockManager(8)
    feed = BlockFeed(blocks, "7")
    early = feed.watch()
    await take(early)
    add(blocks, 1)
    late = feed.watch()
    snapshot = await take(late)
    assert set(snapshot.added) == {block_hash(1)}
    assert (await take(early)).added == (block_hash(1),)
    add(blocks, 2)
    feed.poll()
    assert (await take(early)).added == (await take(late)).added == (block_hash(2),)


async def test_listener_that_falls_behind_gets_a_new_snapshot() -> None:
    blocks = BlockManager(64)
    feed = BlockFeed(blocks, "7", max_pending=3)
    watch = feed.watch()
    await take(watch)
    for n in range(10):
        add(blocks, n)
        feed.poll()
    update = await take(watch)
    assert update.snapshot
    assert len(update.added) == 10
    add(blocks, 99)
    feed.poll()
    delta = await take(watch)
    assert (delta.first_seq, delta.added) == (update.next_seq, (block_hash(99),))


async def test_changes_are_passed_on_while_it_runs_and_its_end_ends_every_watch() -> None:
    blocks = BlockManager(8)
    feed = BlockFeed(blocks, "7", interval_s=0.002)
    feed.start()
    watch = feed.watch()
    await take(watch)
    add(blocks, 5)
    assert (await take(watch)).added == (block_hash(5),)
    await feed.stop()
    async with asyncio.timeout(PATIENCE_S):
        assert [update async for update in watch] == []


async def test_digests_are_of_what_is_held_and_wait_while_it_changes() -> None:
    blocks = BlockManager(8)
    feed = BlockFeed(blocks, "7")
    watch = feed.watch()
    await take(watch)
    add(blocks, 1)
    assert not feed.tell_digest()  # what changed goes first
    assert (await take(watch)).added == (block_hash(1),)
    assert feed.tell_digest()
    told = await take(watch)
    assert (told.added, told.removed, told.first_seq) == ((), (), told.next_seq)
    assert told.digest == set_digest([block_hash(1)])
    add(blocks, 2)
    feed.poll()
    assert (await take(watch)).first_seq == told.next_seq


async def test_a_feed_that_runs_tells_digests_by_itself() -> None:
    blocks = BlockManager(8)
    add(blocks, 1)
    feed = BlockFeed(blocks, "7", interval_s=0.01)
    feed.start()
    watch = feed.watch()
    await take(watch)
    assert (await take(watch)).digest == set_digest([block_hash(1)])
    await feed.stop()


def test_a_digest_of_two_million_blocks_comes_often_enough_to_heal_drift_within_three_seconds() -> None:
    # The router waits half a second before it asks for a snapshot (test_rpc_cluster.py heals a drift end to end)
    assert digest_pause_s(0.0) == digest_pause_s(0.05) == 1.0
    assert digest_pause_s(0.1) <= 2.0
    joined = np.random.default_rng(0).bytes(16 * 200_000)
    hashes = [BlockHash(joined[at : at + 16]) for at in range(0, len(joined), 16)]
    began_s = time.thread_time()
    set_digest(tuple(hashes))
    assert time.thread_time() - began_s < 0.1  # a tenth of them, by a machine that may be busy
