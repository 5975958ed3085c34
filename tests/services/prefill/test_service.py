import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from epdserve.services.config import ConfigError
from epdserve.services.errors import Cancelled, Draining, Internal, Unavailable
from epdserve.services.prefill.service import PrefillService, build
from epdserve.services.types import PrefillJob, token_ids
from support.engine import TENANT, prompt
from support.pools import worker_table


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[PrefillService]:
    service = build(worker_table(tmp_path, "prefill-0"))
    await service.start()
    yield service
    await service.stop(0.0)


def job(length: int, seed: int = 0) -> PrefillJob:
    return PrefillJob("r", token_ids(prompt(length, seed)), TENANT)


async def test_stop_waits_for_running_prompts_and_open_leases(tmp_path: Path) -> None:
    service = build(worker_table(tmp_path, "prefill-0"))
    await service.start()
    running = asyncio.create_task(service.run(job(100), deadline_s=20.0))
    await asyncio.sleep(0.01)
    stopping = asyncio.create_task(service.stop(20.0))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await service.run(job(9), deadline_s=5.0)
    handle = (await running).handle
    await asyncio.sleep(0.05)
    assert not stopping.done()
    assert await service.release_lease(handle.lease, incarnation=handle.incarnation)
    async with asyncio.timeout(10):
        await stopping


async def test_stop_without_patience_fails_what_runs(tmp_path: Path) -> None:
    service = build(worker_table(tmp_path, "prefill-0"))
    await service.start()
    running = asyncio.create_task(service.run(job(700), deadline_s=20.0))
    await asyncio.sleep(0.05)
    await service.stop(0.0)
    with pytest.raises(Unavailable):
        await running
    assert service._host.runner.leaked_pages() == 0


async def test_crashed_step_loop_fails_its_callers_and_ends_the_life(service: PrefillService) -> None:
    def crash() -> bool:
        raise RuntimeError("no such kernel")

    service._loop._step = crash
    with pytest.raises(Internal, match="crashed"):
        await service.run(job(20), deadline_s=10.0)
    with pytest.raises(Internal, match="crashed"):
        service.info()


async def test_answer_that_nobody_takes_holds_no_page(service: PrefillService) -> None:
    task = asyncio.create_task(service.run(job(40), deadline_s=10.0))
    while service._leases.counts().held == 0:  # noqa: ASYNC110 - granted in the step loop
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():  # the answer was faster than the cancellation
        handle = task.result().handle
        await service.release_lease(handle.lease, incarnation=handle.incarnation)
    async with asyncio.timeout(5):
        while service._leases.counts().held:  # noqa: ASYNC110 - ended by a callback in another thread
            await asyncio.sleep(0.005)


async def test_an_abandoned_job_leaves_nothing_whether_it_runs_or_has_answered(
    service: PrefillService,
) -> None:
    handle = (await service.run(job(40), deadline_s=10.0)).handle
    assert service._worker.leases_of("r") == (handle.lease,)
    await service.abandon("r")
    assert service._worker.leases_of("r") == ()
    assert not await service.release_lease(handle.lease, incarnation=handle.incarnation)
    running = asyncio.create_task(service.run(job(700), deadline_s=10.0))
    while not service._worker.active:  # noqa: ASYNC110 - taken by the step loop
        await asyncio.sleep(0)
    await service.abandon("r")
    with pytest.raises(Cancelled):
        await running
    await service.abandon("never heard of")
    assert service._leases.counts().held == 0
    assert service._host.runner.leaked_pages() == 0


def test_settings_that_do_not_fit_are_told(tmp_path: Path) -> None:
    table = worker_table(tmp_path, "prefill-0")
    table["role"] = {"engine": {"model_dir": "x"}, "lease_ttl_s": 0}
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        build(table)
