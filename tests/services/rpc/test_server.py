from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from epdserve.services.errors import (
    DeadlineExceeded,
    Internal,
    LeaseLost,
    Overloaded,
    ServiceError,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from epdserve.services.rpc.auth import VERSION_KEY, token_metadata
from epdserve.services.rpc.channel import open_channel
from epdserve.services.rpc.client import DecodeClient, PrefillClient
from epdserve.services.rpc.pb import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from epdserve.services.rpc.server import RpcServer, serve_decode, serve_prefill
from epdserve.services.rpc.status import error_of
from support.fake_decode import TOKEN, FakeDecode
from support.fake_prefill import JOB, RESULT, FakePrefill
from support.waiting import until


@pytest.fixture
def handler() -> FakePrefill:
    return FakePrefill()


@pytest.fixture
async def server(handler: FakePrefill) -> AsyncIterator[RpcServer]:
    server = await serve_prefill(handler, token=TOKEN)
    yield server
    await server.stop(grace_s=0.1)


@pytest.fixture
async def client(server: RpcServer) -> AsyncIterator[PrefillClient]:
    async with PrefillClient(server.address, token=TOKEN, worker="w") as client:
        yield client


async def test_job_and_result_pass_unchanged_with_the_time_left(
    client: PrefillClient, handler: FakePrefill
) -> None:
    assert await client.run(JOB, deadline_s=5) == RESULT
    assert handler.jobs == [JOB]
    assert handler.deadlines[0] is not None
    assert 4 < handler.deadlines[0] < 5.1  # gRPC rounds up


async def test_port_0_listens_on_loopback_and_reports_the_port(server: RpcServer) -> None:
    host, port = server.address.split(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_taken_port_is_a_clear_error(server: RpcServer) -> None:
    with pytest.raises(Unavailable, match=server.address):
        await serve_prefill(FakePrefill(), token=TOKEN, address=server.address)


async def test_lease_and_description(client: PrefillClient, handler: FakePrefill) -> None:
    assert await client.release_lease("lease", incarnation="1", deadline_s=5)
    assert not await client.release_lease("lease", incarnation="0", deadline_s=5)
    assert await client.describe(deadline_s=5) == await handler.describe()


@pytest.mark.parametrize(
    "error",
    [
        Overloaded("full", retry_after_s=2.5),
        LeaseLost("gone", worker="other"),
        Internal("n" * 50_000, param="p" * 50_000),
        Internal("\u00e9" * 50_000),
    ],
    ids=["fields", "worker", "long", "not ascii"],
)
async def test_error_of_a_handler_reaches_the_caller(
    client: PrefillClient, handler: FakePrefill, error: ServiceError
) -> None:
    handler.error = error
    with pytest.raises(type(error)) as raised:
        await client.run(JOB, deadline_s=5)
    assert raised.value.message[:500] == error.message[:500]
    assert raised.value.retry_after_s == error.retry_after_s
    assert raised.value.worker == (error.worker or "w")


async def test_bug_of_a_handler_is_internal_and_tells_nothing(
    client: PrefillClient, handler: FakePrefill
) -> None:
    handler.error = KeyError("a secret")
    with pytest.raises(Internal, match="KeyError") as raised:
        await client.run(JOB, deadline_s=5)
    assert "secret" not in raised.value.message


async def test_abandoning_names_the_job(client: PrefillClient, handler: FakePrefill) -> None:
    await client.abandon("a", deadline_s=5)
    assert handler.abandoned == ["a"]


async def test_cancelled_caller_cancels_the_job(client: PrefillClient, handler: FakePrefill) -> None:
    handler.hang = True
    call = asyncio.create_task(client.run(JOB, deadline_s=30))
    await until(lambda: bool(handler.jobs))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: handler.cancelled == 1)


async def test_deadline_ends_call_and_job(client: PrefillClient, handler: FakePrefill) -> None:
    handler.hang = True
    with pytest.raises(DeadlineExceeded):
        await client.run(JOB, deadline_s=0.1)
    await until(lambda: handler.cancelled == 1)


async def test_absent_worker_is_lost() -> None:
    async with PrefillClient("127.0.0.1:9", token=TOKEN, worker="w") as client:
        with pytest.raises(WorkerLost) as raised:
            await client.describe(deadline_s=2)
        assert raised.value.worker == "w"


async def test_server_that_stops_fails_its_calls(server: RpcServer, handler: FakePrefill) -> None:
    handler.hang = True
    async with PrefillClient(server.address, token=TOKEN) as client:
        call = asyncio.create_task(client.run(JOB, deadline_s=30))
        await until(lambda: bool(handler.jobs))
        await server.stop(grace_s=0.0)
        with pytest.raises(WorkerLost):
            await call


@pytest.mark.parametrize("token", ["wrong-token-of-some-length", TOKEN + "x", TOKEN[:-1]])
async def test_wrong_token_reaches_no_handler(server: RpcServer, handler: FakePrefill, token: str) -> None:
    async with PrefillClient(server.address, token=token) as client:
        with pytest.raises(Unauthenticated):
            await client.run(JOB, deadline_s=5)
        with pytest.raises(Unauthenticated):
            await client.describe(deadline_s=5)
    assert handler.jobs == []


async def test_no_token_is_refused_on_every_kind_of_call() -> None:
    engine = FakeDecode()
    server = await serve_decode(engine, engine.sessions, token=TOKEN)
    channel = open_channel(server.address)
    stub = decode_pb2_grpc.DecodeStub(channel)
    calls = [
        stub.Describe(common_pb2.DescribeRequest(), timeout=5),
        stub.WatchBlocks(common_pb2.WatchBlocksRequest(), timeout=5).read(),
        stub.Session(iter([decode_pb2.RouterFrame()]), timeout=5).read(),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert isinstance(error_of(raised.value), Unauthenticated)
    await channel.close(None)
    await server.stop(grace_s=0.1)


async def test_unknown_method_is_refused(server: RpcServer) -> None:
    channel = open_channel(server.address)
    call = channel.unary_unary("/epdserve.v1.Prefill/Nothing")(b"", metadata=token_metadata(TOKEN), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert isinstance(error_of(raised.value), Internal)
    await channel.close(None)


async def test_job_nobody_of_ours_sends_is_an_invalid_request(server: RpcServer) -> None:
    channel = open_channel(server.address)
    stub = prefill_pb2_grpc.PrefillStub(channel)
    call = stub.Run(prefill_pb2.PrefillJob(tokens=b"abc"), metadata=token_metadata(TOKEN), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await channel.close(None)


async def test_decode_worker_describes_itself() -> None:
    engine = FakeDecode()
    server = await serve_decode(engine, engine.sessions, token=TOKEN)
    async with DecodeClient(server.address, token=TOKEN) as client:
        assert await client.describe(deadline_s=5) == await engine.describe()
    await server.stop(grace_s=0.1)


async def test_stream_that_does_not_introduce_itself_is_refused() -> None:
    engine = FakeDecode()
    server = await serve_decode(engine, engine.sessions, token=TOKEN)
    channel = open_channel(server.address)
    frames = iter([decode_pb2.RouterFrame(cancel=decode_pb2.Cancel(request_id="a"))])
    call = decode_pb2_grpc.DecodeStub(channel).Session(frames, metadata=token_metadata(TOKEN), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError, match="Hello"):
        await call.read()
    await channel.close(None)
    await server.stop(grace_s=0.1)


async def test_callers_of_another_wire_version_are_told_so_and_may_go_elsewhere(server: RpcServer) -> None:
    channel = open_channel(server.address)
    stub = prefill_pb2_grpc.PrefillStub(channel)
    token = token_metadata(TOKEN)[0]
    try:
        for spoken in (((VERSION_KEY, "1"),), ()):  # untold is what was spoken before there was a key
            await stub.Describe(common_pb2.DescribeRequest(), timeout=5, metadata=(token, *spoken))
        metadata = (token, (VERSION_KEY, "2"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Describe(common_pb2.DescribeRequest(), timeout=5, metadata=metadata)
        error = error_of(refused.value, worker="w")
        assert type(error) is Unavailable
        assert "wire version '2'" in error.message
    finally:
        await channel.close(None)
