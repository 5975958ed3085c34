from __future__ import annotations

import asyncio

import pytest
from epdserve.services.router.patience import Patience, StallGuard


async def test_a_wait_that_lasts_is_told_once() -> None:
    told: list[int] = []
    patience = Patience(0.02, lambda: told.append(1))
    patience.begin()
    await asyncio.sleep(0.1)
    assert told == [1]
    patience.close()


async def test_short_waits_and_no_waits_are_not_told() -> None:
    told: list[int] = []
    patience = Patience(0.04, lambda: told.append(1))
    for _ in range(6):
        patience.begin()
        await asyncio.sleep(0.01)
        patience.end()
    await asyncio.sleep(0.1)
    assert told == []
    patience.close()


async def test_a_stalled_wait_is_broken() -> None:
    async def stall() -> None:
        with StallGuard(0.01) as guard:
            guard.begin()
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError):
        await stall()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def stall() -> None:
        with StallGuard(5.0) as guard:
            guard.begin()
            await asyncio.sleep(10)

    task = asyncio.create_task(stall())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
