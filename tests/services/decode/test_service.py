import asyncio
from pathlib import Path

import pytest
from epdserve.services.decode.service import DecodeService, build
from epdserve.services.errors import Draining, Internal, InvalidRequest, ServiceError
from epdserve.services.rpc.decode_session import DecodeSession
from epdserve.services.types import DecodeJob, token_ids
from support.engine import TENANT, greedy, prompt
from support.pools import TOKEN, worker_table


def job(length: int, new_tokens: int) -> DecodeJob:
    return DecodeJob(
        request_id=f"r{length}-{new_tokens}",
        tokens=token_ids(prompt(length)),
        tenant_key=TENANT,
        exact=False,
        sampling=greedy(new_tokens),
        handle=None,
    )


async def started(folder: Path) -> DecodeService:
    service = build(worker_table(folder, "decode-0"))
    await service.start()
    return service


def session(service: DecodeService) -> DecodeSession:
    return DecodeSession(service.info().address, token=TOKEN, router_id="test", worker="decode-0")


async def test_worker_decodes_while_the_registry_is_away(tmp_path: Path) -> None:
    service = await started(tmp_path)
    async with session(service) as router:
        chunks = [chunk async for chunk in router.submit(job(12, 5), deadline_s=20.0)]
    assert sum(len(chunk.tokens) for chunk in chunks) == 5
    assert (await service.describe()).info.worker == "decode-0"
    await service.stop(1.0)
    assert service._host.runner.leaked_pages() == 0


async def test_stop_without_patience_hands_requests_back(tmp_path: Path) -> None:
    service = await started(tmp_path)
    async with session(service) as router:
        stream = router.submit(job(12, 700), deadline_s=30.0)
        await anext(aiter(stream))
        stopping = asyncio.create_task(service.stop(0.0))
        with pytest.raises(ServiceError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "draining"  # so the router goes on elsewhere, and counts no fault
        assert (caught.value.tokens_delivered or 0) >= 1
        await stopping
    assert service._host.runner.leaked_pages() == 0


async def test_jobs_are_refused_with_their_reason(tmp_path: Path) -> None:
    service = await started(tmp_path)
    async with session(service) as router:
        with pytest.raises(InvalidRequest):
            async for _ in router.submit(job(900, 3), deadline_s=20.0):
                pass
        service._state = type(service._state).DRAINING
        with pytest.raises(Draining):
            async for _ in router.submit(job(9, 3), deadline_s=20.0):
                pass
    await service.stop(0.0)


async def test_crashed_step_loop_fails_its_requests_and_ends_the_life(tmp_path: Path) -> None:
    service = await started(tmp_path)
    async with session(service) as router:
        stream = router.submit(job(12, 700), deadline_s=30.0)
        await anext(aiter(stream))

        def crash(*_: object) -> None:
            raise RuntimeError("no such kernel")

        service._worker.step = crash  # type: ignore[assignment, method-assign]
        with pytest.raises(Internal, match="crashed"):
            async for _ in stream:
                pass
        with pytest.raises(Internal, match="crashed"):
            service.info()
    await service.stop(0.0)
