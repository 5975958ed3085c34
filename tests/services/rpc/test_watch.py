from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from epdserve.services.rpc import servicers, watch
from epdserve.services.rpc.server import serve_decode, serve_prefill
from epdserve.services.rpc.watch import watch_blocks
from epdserve.services.types import BlockUpdate, WorkerRole
from support.fake_decode import TOKEN, FakeDecode
from support.fake_prefill import FakePrefill
from support.waiting import until


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Watched(FakePrefill):
    """Sends what is put into its queue to whoever watches; None ends the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: asyncio.Queue[BlockUpdate | None] = asyncio.Queue()
        self.watching = 0

    async def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        self.watching += 1
        try:
            while (update := await self.updates.get()) is not None:
                yield update
        finally:
            self.watching -= 1


async def read(updates: AsyncGenerator[BlockUpdate, None]) -> BlockUpdate:
    async with asyncio.timeout(5):
        return await anext(updates)


async def test_snapshot_deltas_and_reconnection() -> None:
    worker = Watched()
    server = await serve_prefill(worker, token=TOKEN)
    updates = watch_blocks(server.address, role=WorkerRole.PREFILL, token=TOKEN)
    snapshot = BlockUpdate("1", True, 0, 3, (name(1), name(2)), ())
    delta = BlockUpdate("1", False, 3, 5, (name(3),), (name(1),))
    later = BlockUpdate("1", True, 0, 9, (name(7),), ())
    for update in (snapshot, delta, None, later):
        worker.updates.put_nowait(update)
    assert [await read(updates) for _ in range(3)] == [snapshot, delta, later]
    await updates.aclose()
    await until(lambda: worker.watching == 0)
    await server.stop(grace_s=0.1)


@pytest.mark.parametrize(
    "delta",
    [BlockUpdate("1", False, 4, 5, (name(3),), ()), BlockUpdate("2", False, 3, 4, (name(3),), ())],
    ids=["gap", "another life"],
)
async def test_update_that_does_not_fit_is_not_handed_on(delta: BlockUpdate) -> None:
    worker = Watched()
    server = await serve_prefill(worker, token=TOKEN)
    updates = watch_blocks(server.address, role=WorkerRole.PREFILL, token=TOKEN)
    snapshot = BlockUpdate("1", True, 0, 3, (name(1),), ())
    again = BlockUpdate("1", True, 0, 5, (name(1), name(3)), ())
    for update in (snapshot, delta):
        worker.updates.put_nowait(update)
    assert await read(updates) == snapshot
    waiting = asyncio.create_task(read(updates))
    await asyncio.sleep(0.05)
    worker.updates.put_nowait(None)
    worker.updates.put_nowait(again)
    got = await waiting
    while got != again:
        got = await read(updates)
    await updates.aclose()
    await server.stop(grace_s=0.1)


async def test_large_snapshot_comes_in_parts_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicers, "SNAPSHOT_PART_HASHES", 10)
    worker = Watched()
    server = await serve_prefill(worker, token=TOKEN)
    updates = watch_blocks(server.address, role=WorkerRole.PREFILL, token=TOKEN)
    snapshot = BlockUpdate("1", True, 0, 25, tuple(name(number) for number in range(25)), ())
    assert [more for _, more in servicers.snapshot_parts(snapshot)] == [True, True, False]
    worker.updates.put_nowait(snapshot)
    assert await read(updates) == snapshot
    await updates.aclose()
    await server.stop(grace_s=0.1)


async def test_a_worker_that_only_ever_adds_is_asked_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_SNAPSHOT_HASHES", 2)
    worker = Watched()
    server = await serve_prefill(worker, token=TOKEN)
    updates = watch_blocks(server.address, role=WorkerRole.PREFILL, token=TOKEN)
    snapshot = BlockUpdate("1", True, 0, 1, (name(0),), ())
    endless = [BlockUpdate("1", False, n, n + 1, (name(n),), ()) for n in range(1, 5)]
    for update in (snapshot, *endless, None, snapshot):
        worker.updates.put_nowait(update)
    assert [await read(updates) for _ in range(5)] == [snapshot, *endless[:3], snapshot]
    await updates.aclose()
    await server.stop(grace_s=0.1)


async def test_watch_of_a_decode_worker_and_of_nobody() -> None:
    engine = FakeDecode()
    server = await serve_decode(engine, engine.sessions, token=TOKEN)
    updates = watch_blocks(server.address, role=WorkerRole.DECODE, token=TOKEN)
    assert (await read(updates)).snapshot
    await updates.aclose()
    await server.stop(grace_s=0.1)
    nobody = watch_blocks("127.0.0.1:9", role=WorkerRole.DECODE, token=TOKEN)
    waiting = asyncio.ensure_future(anext(nobody))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    waiting.cancel()
    await asyncio.wait([waiting])
    await nobody.aclose()


async def test_watches_do_not_hold_up_the_end_of_a_worker() -> None:
    worker = Watched()
    server = await serve_prefill(worker, token=TOKEN)
    updates = watch_blocks(server.address, role=WorkerRole.PREFILL, token=TOKEN)
    worker.updates.put_nowait(BlockUpdate("1", True, 0, 0, (), ()))
    await read(updates)
    async with asyncio.timeout(5):
        await server.stop(grace_s=30)
    assert worker.watching == 0
    await updates.aclose()


async def test_a_worker_that_ends_amid_messages_ends_without_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(5):
        worker = Watched()
        server = await serve_prefill(worker, token=TOKEN)
        updates = watch_blocks(server.address, role=WorkerRole.PREFILL, token=TOKEN)
        worker.updates.put_nowait(BlockUpdate("1", True, 0, 0, (), ()))
        names = tuple(name(number) for number in range(4000))  # more than flow control lets pass unread
        for number in range(50):
            worker.updates.put_nowait(BlockUpdate("1", False, number, number + 1, names, ()))
        await read(updates)
        async with asyncio.timeout(5):
            await server.stop(grace_s=30)
        assert worker.watching == 0
        await updates.aclose()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
