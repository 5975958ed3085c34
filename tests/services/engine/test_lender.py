from __future__ import annotations

import asyncio

import pytest
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.types import BlockHash
from epdserve.services.engine import lender as module
from epdserve.services.engine.lender import LEASE_S, MOST_LOANS, PageLender
from support.manual_clock import ManualClock
from support.waiting import until

HASHES = tuple(bytes([number]) * 16 for number in range(4))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def blocks(clock: ManualClock) -> BlockManager:
    """Four blocks of a chain, held by nobody; the last one is tainted."""
    manager = BlockManager(4, clock)
    parent = None
    pages = manager.reserve(4)
    for number, page in enumerate(pages):
        block_hash = BlockHash(HASHES[number])
        manager.seal(page, block_hash, parent=parent, exact=number < 3, checksum=100 + number)
        parent = block_hash
    manager.release(pages)
    return manager


def test_what_is_lent_stays_until_it_is_returned(blocks: BlockManager, clock: ManualClock) -> None:
    lender = PageLender(blocks, clock, "7")
    lent = lender.lend((*HASHES, b"x" * 16), exact=False)
    assert [ref.block_hash for ref in lent.blocks] == list(HASHES)
    assert [ref.checksum for ref in lent.blocks] == [100, 101, 102, 103]
    assert lent.incarnation == "7"
    assert blocks.available() == 0
    assert not lender.end(lent.lease, incarnation="6")
    assert lender.end(lent.lease, incarnation="7")
    assert not lender.end(lent.lease, incarnation="7")
    assert blocks.available() == 4
    assert [ref.block_hash for ref in lender.lend(HASHES, exact=True).blocks] == list(HASHES[:3])


def test_nothing_held_is_no_loan(blocks: BlockManager, clock: ManualClock) -> None:
    lender = PageLender(blocks, clock, "7")
    lent = lender.lend((b"x" * 16, *HASHES), exact=False)
    assert (lent.lease, lent.blocks, lender.held) == ("", (), 0)


def test_loans_are_bounded_and_end_by_the_clock(blocks: BlockManager, clock: ManualClock) -> None:
    lender = PageLender(blocks, clock, "7")
    loans = [lender.lend(HASHES[:1], exact=False) for _ in range(MOST_LOANS + 1)]
    assert [bool(loan.blocks) for loan in loans] == [True] * MOST_LOANS + [False]
    clock.advance(LEASE_S)
    assert not lender.end(loans[0].lease, incarnation="7")
    assert blocks.available() == 3  # others still hold the page


async def test_a_reader_that_died_holds_no_page_for_ever(
    blocks: BlockManager, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    lender = PageLender(blocks, clock, "7")
    lender.start()
    lender.lend(HASHES, exact=False)
    await asyncio.sleep(0.03)
    assert lender.held == 1
    clock.advance(LEASE_S)
    await until(lambda: lender.held == 0 and blocks.available() == 4)
    lender.lend(HASHES, exact=False)
    await lender.stop()
    assert blocks.available() == 4
