from __future__ import annotations

import asyncio

from epdserve.services.rpc.signal import Signal


async def test_a_wait_ends_with_the_signal_and_not_before() -> None:
    signal = Signal()
    waiting = asyncio.ensure_future(signal.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    signal.set()
    await waiting
    assert signal.is_set()


async def test_what_is_set_is_not_waited_for_and_what_is_cleared_is() -> None:
    signal = Signal()
    signal.set()
    await signal.wait()
    signal.clear()
    waiting = signal.wait()
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_a_waiter_that_was_cancelled_does_not_keep_the_next_one_waiting() -> None:
    signal = Signal()
    first = asyncio.create_task(_waited(signal))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(_waited(signal))
    await asyncio.sleep(0)
    signal.set()
    await second


async def _waited(signal: Signal) -> None:
    await signal.wait()
