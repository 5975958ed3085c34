"""What a waiting request has in the store comes up, or does not: every way it can go wrong costs hits and no page."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.preparing import Prepared, sources_of
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.policy.fetching import Speeds
from epdserve.services.store_types import CacheTier
from epdserve.services.types import TokenSources
from support.engine import eventually, prompt
from support.scripted_store import WorkerDesk

HISTORY, LONGER = prompt(64), np.concatenate([prompt(64), prompt(13, 1)])


@pytest.fixture
async def desk() -> AsyncIterator[WorkerDesk]:
    desk = WorkerDesk()
    yield desk
    await desk.close()


async def prepare(desk: WorkerDesk, request: RunningRequest) -> Prepared:
    ready: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
    desk.preparer.start(request, ready.set_result)
    async with asyncio.timeout(10):
        return await ready


async def hit(desk: WorkerDesk, request: RunningRequest) -> TokenSources:
    """Prepare and start a request; where its tokens came from."""
    prepared = await prepare(desk, request)
    tail = prepared.tail
    assert onboard(desk.runner, request, tail.tail if tail else None)
    if tail is not None:
        desk.runner.staging_slots.release(tail.staging)
    sources = sources_of(desk.runner, request, prepared)
    desk.runner.release(request)
    return sources


async def test_blocks_come_up_and_their_bytes_are_those_of_the_store(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.store.tiers = {ref.block_hash: CacheTier.SSD for ref in desk.store.held[5:]}
    assert await hit(desk, desk.request(LONGER)) == TokenSources(host=40, ssd=24, computed=13)
    hashes = [ref.block_hash for ref in desk.store.held]
    pages = desk.runner.blocks.match(hashes, exact=False)  # type: ignore[arg-type]
    assert (desk.runner.pools.pages[pages] == desk.store.blocks[: len(pages)]).all()
    desk.runner.blocks.release(pages)
    assert desk.store.ended == [("lease", ())]
    assert desk.count("fetches", outcome="done") == 1


async def test_what_is_held_here_is_not_fetched_again(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    await hit(desk, desk.request(LONGER))
    again = np.concatenate([prompt(64), prompt(9, 2)])
    assert await hit(desk, desk.request(again)) == TokenSources(device=64, computed=9)
    assert desk.count("fetches", outcome="done") == 1


async def test_long_chains_come_in_portions() -> None:
    desk = WorkerDesk(use=StoreUse(portion_blocks=3))
    desk.store.keep(desk.source, HISTORY)
    assert (await hit(desk, desk.request(LONGER))).host == 64
    assert desk.count("fetches", outcome="done") == 3
    await desk.close()


async def test_a_block_of_wrong_bytes_ends_the_hit_before_it_and_is_told(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.store.blocks[5, 17] ^= 1
    assert (await hit(desk, desk.request(LONGER))).host == 40
    assert desk.store.ended == [("lease", (desk.store.held[5].block_hash,))]
    assert desk.count("fetches", outcome="corrupt") == 1


async def test_a_header_of_another_block_is_no_block(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.store.blocks[3] = desk.store.blocks[4].clone()
    assert (await hit(desk, desk.request(LONGER))).host == 24


async def test_a_store_that_lends_other_blocks_than_asked_for_gives_none(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    request = desk.request(LONGER)
    held = list(desk.store.held)

    async def others(*_: object, **__: object) -> object:
        desk.store.held = held[2:]  # between the two calls
        return (type("Run", (), {"tier": CacheTier.HOST, "blocks": 8})(),)

    desk.store.locate = others  # type: ignore[method-assign, assignment]
    assert await hit(desk, request) == TokenSources(computed=77)


async def test_bytes_are_not_believed_once_the_lease_is_lost(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.store.lease_holds = False
    assert await hit(desk, desk.request(LONGER)) == TokenSources(computed=77)
    assert desk.count("fetches", outcome="lease_lost") == 1


async def test_a_store_that_breaks_off_gives_what_came_before(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.store.error, desk.store.error_after = desk.lost(), 2
    assert (await hit(desk, desk.request(LONGER))).host == 48
    assert desk.link.failures == ["worker_lost"]


async def test_a_store_that_fails_costs_hits(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.store.error = desk.lost()
    assert await hit(desk, desk.request(LONGER)) == TokenSources(computed=77)


async def test_a_missing_store_costs_hits(desk: WorkerDesk) -> None:
    desk.link.present = False
    assert await hit(desk, desk.request(LONGER)) == TokenSources(computed=77)


async def test_a_dead_transfer_costs_hits(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.fabric.cut("store-0")
    assert await hit(desk, desk.request(LONGER)) == TokenSources(computed=77)
    assert desk.count("fetches", outcome="failed") == 1


async def test_a_store_that_hangs_costs_the_deadline_and_late_bytes_land_in_no_ones_pages() -> None:
    desk = WorkerDesk(use=StoreUse(transfer_deadline_s=0.2))
    desk.store.keep(desk.source, HISTORY)
    desk.fabric.hold("store-0")
    assert await hit(desk, desk.request(LONGER)) == TokenSources(computed=77)
    assert desk.runner.blocks.counts().quarantined == 8
    free = desk.runner.blocks.reserve(desk.runner.blocks.available())
    desk.runner.pools.pages[free] = 0xAB
    desk.fabric.resume("store-0")
    await asyncio.to_thread(eventually, lambda: desk.runner.blocks.counts().quarantined == 0)
    assert (desk.runner.pools.pages[free] == 0xAB).all()
    desk.runner.blocks.abort(free)
    await desk.close()


async def test_cancelling_gives_everything_back_at_once(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    desk.store.gate.clear()
    request = desk.request(LONGER)
    ready: asyncio.Future[Prepared] = asyncio.get_running_loop().create_future()
    desk.preparer.start(request, ready.set_result)
    await asyncio.sleep(0.05)
    assert desk.preparer.preparing == 1
    desk.preparer.cancel(request)
    async with asyncio.timeout(1):
        assert (await ready).tiers == {}
    assert desk.runner.leaked_pages() == 0
    desk.store.gate.set()


async def test_pages_of_those_that_run_are_not_taken(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    taken = desk.runner.blocks.reserve(desk.runner.blocks.available() - 10)
    prepared = await prepare(desk, desk.request(LONGER))
    assert prepared.tiers == {}
    assert desk.count("fetches", outcome="no_room") == 1
    desk.runner.blocks.abort(taken)


async def test_what_is_slower_to_fetch_is_computed(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    slow = Speeds(prefill_tokens_per_s=1e6, bytes_per_s={"host": 1000.0})
    desk.preparer._speeds.speeds = lambda: slow  # type: ignore[method-assign]
    assert await hit(desk, desk.request(LONGER)) == TokenSources(computed=77)
    assert desk.count("tails", outcome="not_worth_it") == 1
    assert not desk.store.asked_tails


async def test_what_the_store_has_lost_is_offered_again(desk: WorkerDesk) -> None:
    desk.store.keep(desk.source, HISTORY)
    await hit(desk, desk.request(LONGER))
    desk.offloader.start()
    lost = [ref.block_hash for ref in desk.store.held[3:]]
    del desk.store.held[3:]
    await hit(desk, desk.request(np.concatenate([HISTORY, prompt(9, 3)])))
    await asyncio.to_thread(eventually, lambda: len(desk.store.offers) == 1)
    assert [block.ref.block_hash for block in desk.store.offers[0].blocks] == lost


# -- tails ---------------------------------------------------------------------------------------------------


def lend_tail(desk: WorkerDesk, position: int) -> None:
    """The store holds the chain and a tail, as prompts that end one token after it leave them."""
    desk.store.keep(desk.source, HISTORY)
    desk.source.run(prompt(position + 1), tail_at=position)
    tail = desk.source.shelf.tails[position]
    desk.store.keep_tail(tail.record_B, tail.checksum, after_tokens=position % 8, exact=tail.exact)
    desk.source.end_leases()


async def test_a_tail_comes_up_with_the_chain(desk: WorkerDesk) -> None:
    lend_tail(desk, 61)
    longer = np.concatenate([prompt(61), prompt(20, 2)])
    assert await hit(desk, desk.request(longer)) == TokenSources(host=56, tail=5, computed=20)
    (query,) = desk.store.asked_tails
    assert [len(candidate.after) for candidate in query.candidates] == [8, 8]
    assert query.candidates[0].after.tolist() == longer[56:64].tolist()
    assert ("tail-lease", ()) in desk.store.ended
    assert desk.count("tails", outcome="found") == 1


async def test_a_tail_of_wrong_bytes_is_found_out_when_it_is_restored(desk: WorkerDesk) -> None:
    lend_tail(desk, 61)
    desk.store.tails[1, 9] ^= 1
    longer = np.concatenate([prompt(61), prompt(20, 2)])
    assert await hit(desk, desk.request(longer)) == TokenSources(host=56, computed=25)


async def test_a_tail_whose_lease_is_lost_is_none(desk: WorkerDesk) -> None:
    lend_tail(desk, 61)
    desk.store.lease_holds = False
    assert (await prepare(desk, desk.request(np.concatenate([prompt(61), prompt(20, 2)])))).tail is None
    assert desk.count("tails", outcome="lease_lost") == 1


async def test_hand_offs_keep_staging_slots_to_themselves(desk: WorkerDesk) -> None:
    lend_tail(desk, 61)
    slots = [desk.runner.staging_slots.acquire() for _ in range(12)]
    assert (await prepare(desk, desk.request(np.concatenate([prompt(61), prompt(20, 2)])))).tail is None
    assert desk.count("tails", outcome="no_room") == 1
    for slot in slots:
        assert slot is not None
        desk.runner.staging_slots.release(slot)


async def test_a_tail_that_comes_late_leaves_its_slot_in_quarantine() -> None:
    desk = WorkerDesk(use=StoreUse(transfer_deadline_s=0.2))
    lend_tail(desk, 61)
    desk.store.held.clear()
    desk.source.run(prompt(6, 5), tail_at=5)
    tail = desk.source.shelf.tails[5]
    desk.store.keep_tail(tail.record_B, tail.checksum, after_tokens=5, exact=True)
    desk.fabric.hold("store-0")
    assert (await prepare(desk, desk.request(np.concatenate([prompt(6, 5), prompt(20, 2)])))).tail is None
    assert desk.runner.staging_slots.counts().quarantined == 1
    desk.fabric.resume("store-0")
    await asyncio.to_thread(eventually, lambda: desk.runner.staging_slots.counts().quarantined == 0)
    await desk.close()
