"""Write-behind to the store: nothing waits, everything is given back, what does not fit is dropped and counted."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from epdserve.services.engine.config import StoreUse
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Part
from epdserve.services.store_types import OffloadResult
from support.engine import eventually, prompt
from support.manual_clock import ManualClock
from support.scripted_store import WorkerDesk


@pytest.fixture
async def desk() -> AsyncIterator[WorkerDesk]:
    desk = WorkerDesk()
    desk.runner.on_sealed = desk.offloader.offer_blocks
    desk.offloader.start()
    yield desk
    await desk.close()


def run(desk: WorkerDesk, length: int, seed: int = 0) -> RunningRequest:
    """A prompt that was run; it still holds its pages."""
    request = desk.request(prompt(length, seed))
    assert onboard(desk.runner, request)
    desk.runner.run([Part(request, length)])
    return request


async def told(desk: WorkerDesk) -> None:
    await asyncio.to_thread(eventually, lambda: desk.offloader.pending_bytes == 0)


async def test_sealed_blocks_are_offered_with_their_parents(desk: WorkerDesk) -> None:
    request = run(desk, 45)
    desk.runner.release(request)
    await told(desk)
    (offer,) = desk.store.offers
    assert (offer.worker, offer.incarnation, offer.running) == ("worker-0", "1", False)
    assert [block.ref.block_hash for block in offer.blocks] == request.hashes[:5]
    assert [block.parent for block in offer.blocks] == [None, *request.hashes[:4]]
    assert offer.owner.root == desk.runner.names.root
    assert desk.count("offloaded_blocks", outcome="taken") == 5


async def test_pages_stay_as_they_are_until_the_store_has_answered(desk: WorkerDesk) -> None:
    desk.store.gate.clear()
    desk.runner.release(run(desk, 45))
    await asyncio.sleep(0.02)
    assert desk.offloader.busy
    assert desk.runner.blocks.counts().sealed == 5
    desk.store.gate.set()
    await told(desk)
    assert desk.runner.blocks.counts().sealed == 0


async def test_what_does_not_fit_is_dropped_and_the_step_goes_on() -> None:
    desk = WorkerDesk(use=StoreUse(offload_pending_bytes=3 * 4096))
    desk.runner.on_sealed = desk.offloader.offer_blocks
    desk.offloader.start()
    desk.store.gate.clear()
    desk.runner.release(run(desk, 24))
    desk.runner.release(run(desk, 24, 1))
    assert desk.count("offloaded_blocks", outcome="dropped") == 3
    desk.store.gate.set()
    await told(desk)
    assert desk.count("offloaded_blocks", outcome="taken") == 3
    await desk.close()


@pytest.mark.parametrize("missing", [True, False])
async def test_without_a_store_everything_is_given_back(desk: WorkerDesk, missing: bool) -> None:
    desk.link.present = not missing
    desk.store.error = desk.lost()
    request = run(desk, 45)
    desk.offloader.offer_tail(request)
    desk.runner.release(request)
    await told(desk)
    outcome = "no_store" if missing else "failed"
    assert desk.count("offloaded_blocks", outcome=outcome) == 5
    assert desk.count("offloaded_tails", outcome=outcome) == 1


async def test_answers_are_counted_block_by_block(desk: WorkerDesk) -> None:
    desk.store.answers = lambda request: (OffloadResult.HELD, OffloadResult.REFUSED, OffloadResult.TAKEN)
    desk.runner.release(run(desk, 24))
    await told(desk)
    counted = [desk.count("offloaded_blocks", outcome=o) for o in ("held", "refused", "taken")]
    assert counted == [1, 1, 1]


async def test_a_tail_is_offered_by_its_place_in_the_chain(desk: WorkerDesk) -> None:
    request = run(desk, 45)
    desk.offloader.offer_tail(request)
    desk.runner.release(request)
    await told(desk)
    (offer,) = desk.store.tail_offers
    assert (offer.parent, offer.after_tokens) == (request.hashes[4], 5)
    assert offer.tail.exact


async def test_tails_leave_staging_slots_to_hand_offs(desk: WorkerDesk) -> None:
    desk.store.gate.clear()
    request = run(desk, 20)
    for _ in range(20):
        desk.offloader.offer_tail(request)
    assert desk.runner.staging_slots.counts().free == 4
    assert desk.count("offloaded_tails", outcome="dropped") == 8
    desk.runner.release(request)
    desk.store.gate.set()
    await told(desk)


async def test_a_chain_is_touched_once_a_minute(desk: WorkerDesk) -> None:
    chain = [bytes([n]) * 16 for n in range(3)]
    for _ in range(3):
        desk.offloader.touch(chain)
    desk.offloader.touch([])
    await asyncio.to_thread(eventually, lambda: len(desk.store.touched) == 1)
    desk.runner.clock.advance(61.0)  # type: ignore[attr-defined]
    desk.offloader.touch(chain)
    await asyncio.to_thread(eventually, lambda: len(desk.store.touched) == 2)
    assert desk.store.touched[0] == tuple(chain)


async def test_stopping_drops_what_is_queued() -> None:
    desk = WorkerDesk()
    desk.runner.on_sealed = desk.offloader.offer_blocks
    desk.offloader.start()
    desk.store.gate.clear()
    for seed in range(4):
        desk.runner.release(run(desk, 24, seed))
    await asyncio.sleep(0.02)
    await desk.offloader.stop()
    assert desk.offloader.pending_bytes == 0
    desk.runner.release(run(desk, 24, 9))
    await desk.close()


async def test_a_hand_off_goes_first_but_not_for_long() -> None:
    desk = WorkerDesk()
    handing_off = True
    desk.offloader._handing_off = lambda: handing_off
    desk.runner.on_sealed = desk.offloader.offer_blocks
    desk.offloader.start()
    desk.runner.release(run(desk, 24))
    await asyncio.sleep(0.01)
    assert not desk.store.offers
    handing_off = False
    await told(desk)
    assert len(desk.store.offers) == 1
    handing_off = True
    desk.runner.release(run(desk, 24, 1))
    await asyncio.sleep(0.01)
    assert len(desk.store.offers) == 1
    clock = desk.runner.clock
    assert isinstance(clock, ManualClock)
    clock.advance(0.1)
    await told(desk)  # the hand-off has not ended, and the store is told all the same
    assert len(desk.store.offers) == 2
    await desk.close()
