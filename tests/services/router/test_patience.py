from __future__ import annotations

import asyncio

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


async def stall(guard_s: float) -> bool:
    """Wait until cancelled; whether the guard says that it was its doing."""
    guard = StallGuard(guard_s)
    guard.begin()
    try:
        await asyncio.sleep(10)
    except asyncio.CancelledError as error:
        return guard.close(error)
    raise AssertionError("nobody cancelled")


async def test_a_stalled_wait_is_broken() -> None:
    assert await stall(0.01)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_is_not_the_guards() -> None:
    task = asyncio.create_task(stall(5.0))
    await asyncio.sleep(0)
    task.cancel()
    assert not await task
