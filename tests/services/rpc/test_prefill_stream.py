"""Prefills on one open stream: many share a message, and nothing else differs from calls one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from epdserve.services.errors import InvalidRequest, Overloaded, WorkerLost
from epdserve.services.rpc.client import PrefillClient
from epdserve.services.rpc.convert import prefill_job_to_pb
from epdserve.services.rpc.pb import prefill_pb2, prefill_pb2_grpc
from epdserve.services.rpc.prefill_session import PrefillSession
from epdserve.services.rpc.server import new_server, serve_prefill, start_server
from epdserve.services.rpc.servicers import Context, PrefillServicer
from support.fake_decode import TOKEN
from support.fake_prefill import JOB, RESULT, FakePrefill
from support.waiting import until


class Recording(PrefillServicer):
    """Notes how many jobs each message holds."""

    def __init__(self, handler: FakePrefill) -> None:
        super().__init__(handler)
        self.sizes: list[int] = []
        self.single = 0

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCalls], context: Context
    ) -> None:
        async def noted() -> AsyncIterator[prefill_pb2.PrefillCalls]:
            async for message in request_iterator:
                self.sizes.append(len(message.calls))
                yield message

        await super().Session(noted(), context)

    async def Run(  # noqa: N802
        self, request: prefill_pb2.PrefillJob, context: Context
    ) -> prefill_pb2.PrefillResult:
        self.single += 1
        return await super().Run(request, context)


class Older(Recording):
    """A worker of a version without the stream."""

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCalls], context: Context
    ) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")


async def serving(servicer: PrefillServicer) -> tuple[grpc.aio.Server, str]:
    server = new_server(TOKEN)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    return server, await start_server(server, "127.0.0.1:0")


def jobs(count: int) -> list[Any]:
    return [replace(JOB, request_id=f"r{number}") for number in range(count)]


async def test_jobs_that_are_ready_together_share_a_message() -> None:
    handler = FakePrefill()
    servicer = Recording(handler)
    server, address = await serving(servicer)
    async with PrefillClient(address, token=TOKEN) as client:
        await client.run(JOB, deadline_s=5)
        results = await asyncio.gather(*(client.run(job, deadline_s=5) for job in jobs(20)))
    assert results == [RESULT] * 20
    assert len(handler.jobs) == 21
    assert servicer.sizes == [1, 20]
    assert servicer.single == 0
    await server.stop(0)


async def test_a_worker_without_the_stream_is_called_job_by_job() -> None:
    servicer = Older(FakePrefill())
    server, address = await serving(servicer)
    async with PrefillClient(address, token=TOKEN) as client:
        assert await asyncio.gather(*(client.run(job, deadline_s=5) for job in jobs(3))) == [RESULT] * 3
        assert await client.run(JOB, deadline_s=5) == RESULT
    assert servicer.single == 4
    await server.stop(0)


async def test_errors_belong_to_their_jobs() -> None:
    class Choosy(FakePrefill):
        async def run(self, job: Any, *, deadline_s: float | None) -> Any:
            if job.request_id == "r1":
                raise Overloaded("full", retry_after_s=2.0)
            return await super().run(job, deadline_s=deadline_s)

    server = await serve_prefill(Choosy(), token=TOKEN)
    async with PrefillClient(server.address, token=TOKEN, worker="w") as client:
        got = await asyncio.gather(
            *(client.run(job, deadline_s=5) for job in jobs(3)), return_exceptions=True
        )
    assert got[0] == got[2] == RESULT
    assert isinstance(got[1], Overloaded)
    assert (got[1].retry_after_s, got[1].worker) == (2.0, "w")
    await server.stop(grace_s=0)


async def test_a_broken_stream_is_a_lost_worker_to_all_and_the_next_job_opens_another() -> None:
    handler = FakePrefill()
    handler.hang = True
    server = await serve_prefill(handler, token=TOKEN)
    async with PrefillClient(server.address, token=TOKEN, worker="w") as client:
        calls = [asyncio.create_task(client.run(job, deadline_s=30)) for job in jobs(3)]
        await until(lambda: len(handler.jobs) == 3)
        await server.stop(grace_s=0)
        lost = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(error, WorkerLost) and error.worker == "w" for error in lost)
        assert len(set(map(id, lost))) == 3
        assert handler.cancelled == 3
        handler.hang = False
        server = await serve_prefill(handler, token=TOKEN, address=server.address)
        async with asyncio.timeout(10):
            while True:  # the channel takes a moment to notice
                try:
                    assert await client.run(JOB, deadline_s=5) == RESULT
                    break
                except WorkerLost:
                    await asyncio.sleep(0.05)
    await server.stop(grace_s=0)


async def test_a_server_that_ends_gives_running_jobs_their_answers_and_takes_no_more() -> None:
    class Slow(FakePrefill):
        async def run(self, job: Any, *, deadline_s: float | None) -> Any:
            result = await super().run(job, deadline_s=deadline_s)
            await asyncio.sleep(0.2)
            return result

    handler = Slow()
    server = await serve_prefill(handler, token=TOKEN)
    async with PrefillClient(server.address, token=TOKEN) as client:
        call = asyncio.create_task(client.run(JOB, deadline_s=30))
        await until(lambda: len(handler.jobs) == 1)
        await server.stop(grace_s=5)  # is over as soon as the answer has left
        assert await call == RESULT
        with pytest.raises(WorkerLost):
            await client.run(replace(JOB, request_id="later"), deadline_s=5)
    assert len(handler.jobs) == 1


async def test_an_id_runs_once_at_a_time() -> None:
    handler = FakePrefill()
    handler.hang = True
    server = await serve_prefill(handler, token=TOKEN)
    async with PrefillClient(server.address, token=TOKEN) as client:
        call = asyncio.create_task(client.run(JOB, deadline_s=30))
        await until(lambda: len(handler.jobs) == 1)
        with pytest.raises(ValueError, match="live already"):
            await client.run(JOB, deadline_s=30)
        call.cancel()
        await asyncio.wait([call])
    await server.stop(grace_s=0)


async def test_a_job_that_is_cancelled_before_it_is_sent_never_leaves() -> None:
    handler = FakePrefill()
    server = await serve_prefill(handler, token=TOKEN)
    async with PrefillClient(server.address, token=TOKEN) as client:
        call = asyncio.create_task(client.run(JOB, deadline_s=30))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert await client.run(replace(JOB, request_id="b"), deadline_s=5) == RESULT
    assert [job.request_id for job in handler.jobs] == ["b"]
    await server.stop(grace_s=0)


async def test_the_worker_refuses_an_id_that_is_in_use_and_keeps_the_job_that_has_it() -> None:
    handler = FakePrefill()
    handler.hang = True
    sent: list[prefill_pb2.PrefillAnswers] = []
    call = prefill_pb2.PrefillCall(job=prefill_job_to_pb(JOB), timeout_s=5)

    async def messages() -> AsyncIterator[prefill_pb2.PrefillCalls]:
        yield prefill_pb2.PrefillCalls(calls=[call, call])
        await until(lambda: bool(sent))

    async def send(answers: prefill_pb2.PrefillAnswers) -> None:
        sent.append(answers)

    await PrefillSession(handler).serve(messages(), send)
    (answer,) = [answer for answers in sent for answer in answers.answers]
    assert answer.error.code == InvalidRequest.code
    assert len(handler.jobs) == 1
    assert handler.cancelled == 1  # by the end of the stream
