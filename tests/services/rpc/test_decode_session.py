from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from epdserve.services.errors import Cancelled, DeadlineExceeded, Unauthenticated, WorkerLost
from epdserve.services.rpc.auth import token_metadata
from epdserve.services.rpc.channel import open_channel
from epdserve.services.rpc.convert import decode_job_to_pb
from epdserve.services.rpc.decode_desk import SessionLimits
from epdserve.services.rpc.decode_session import DecodeSession, DecodeSessionLimits
from epdserve.services.rpc.decode_stream import DecodeStream
from epdserve.services.rpc.pb import decode_pb2, decode_pb2_grpc
from epdserve.services.rpc.server import serve_decode, serve_servicer
from epdserve.services.rpc.servicers import Context, DecodeServicer
from epdserve.services.types import FinishReason
from support.fake_decode import TOKEN, FakeDecode, decode_job, expected_token, expected_tokens, serve_flaky
from support.waiting import until

FAST = DecodeSessionLimits(
    connect_s=1.0,
    silence_s=2.0,
    lost_after_s=1.0,
    backoff_min_s=0.005,
    backoff_max_s=0.02,
    acknowledge_s=0.005,
)


def session_to(address: str, *, limits: DecodeSessionLimits = FAST, token: str = TOKEN) -> DecodeSession:
    return DecodeSession(address, token=token, router_id="router-0", worker="decode-0", limits=limits)


@asynccontextmanager
async def worker(
    engine: FakeDecode, *, address: str = "127.0.0.1:0", step: bool = True
) -> AsyncIterator[str]:
    server = await serve_decode(engine, engine.sessions, token=TOKEN, address=address)
    stepping = asyncio.create_task(engine.run()) if step else None
    try:
        yield server.address
    finally:
        if stepping is not None:
            stepping.cancel()
        await server.stop(grace_s=0.1)


async def collect(stream: DecodeStream) -> list[int]:
    tokens: list[int] = []
    async for chunk in stream:
        assert chunk.offset == len(tokens)
        tokens.extend(chunk.tokens)
    return tokens


async def collect_rest(stream: DecodeStream) -> None:
    async for _ in stream:
        pass


async def test_tokens_arrive_in_order_with_finish_and_receipt() -> None:
    engine = FakeDecode()
    async with worker(engine) as address, session_to(address) as session:
        stream = session.submit(decode_job("a", max_tokens=20), deadline_s=10)
        chunks = [chunk async for chunk in stream]
        assert [token for chunk in chunks for token in chunk.tokens] == expected_tokens("a", 20)
        assert chunks[-1].finish_reason is FinishReason.LENGTH
        assert chunks[-1].receipt is not None
        assert chunks[-1].receipt.steps == 20
        assert session.live == 0
        await until(lambda: engine.sessions.kept_tokens() == 0)
        assert await engine.sessions.drained(deadline_s=2)


async def test_many_requests_share_one_frame_a_step() -> None:
    engine = FakeDecode()
    async with worker(engine, step=False) as address, session_to(address) as session:
        streams = [session.submit(decode_job(f"r{i}", max_tokens=5), deadline_s=10) for i in range(16)]
        await until(lambda: len(engine.running) == 16)
        assert streams[0].job.timeout_s == 10  # the worker knows when nobody waits any more
        before = engine.sessions.counts.frames_sent
        engine.step()
        await until(lambda: all(stream.received == 1 for stream in streams))
        assert engine.sessions.counts.frames_sent == before + 1


async def test_steps_faster_than_the_gap_share_frames_and_slower_ones_wait_for_nothing() -> None:
    engine = FakeDecode(limits=SessionLimits(frame_gap_s=0.05, gap_a_request_s=0.02))
    async with worker(engine, step=False) as address, session_to(address) as session:
        stream = session.submit(decode_job("a", max_tokens=21), deadline_s=10)
        await until(lambda: len(engine.running) == 1)
        before = engine.sessions.counts.frames_sent
        engine.step()
        await until(lambda: stream.received == 1)  # nothing was before it: it leaves at once
        for _ in range(20):
            engine.step()
        assert await collect(stream) == expected_tokens("a", 21)
        assert engine.sessions.counts.frames_sent == before + 2


def test_the_gap_grows_with_the_requests_up_to_its_limit() -> None:
    limits = SessionLimits(frame_gap_s=0.002, gap_a_request_s=0.000_5)
    assert [limits.gap_s(requests) for requests in (0, 1, 4, 64)] == [0.0, 0.000_5, 0.002, 0.002]


async def test_resumed_request_goes_on_at_its_offset() -> None:
    engine = FakeDecode()
    emitted = tuple(expected_tokens("a", 7))
    async with worker(engine) as address, session_to(address) as session:
        stream = session.submit(decode_job("a", max_tokens=20, emitted=emitted), deadline_s=10)
        first = await anext(stream)
        assert first.offset == 7
        rest = [token async for chunk in stream for token in chunk.tokens]
        assert list(first.tokens) + rest == expected_tokens("a", 20)[7:]


@pytest.mark.parametrize("direction", ["in", "out", "sent"])
@pytest.mark.parametrize("at", range(0, 12))
async def test_stream_broken_at_any_frame_loses_and_doubles_nothing(direction: str, at: int) -> None:
    engine = FakeDecode()
    hit = lambda where, number: where == direction and number == at  # noqa: E731
    server, flaky = await serve_flaky(engine, hit)
    stepping = asyncio.create_task(engine.run())
    try:
        async with session_to(server.address) as session, asyncio.timeout(10):
            names = ["a", "b", "c"]
            streams = [session.submit(decode_job(name, max_tokens=40), deadline_s=10) for name in names]
            results = await asyncio.gather(*(collect(stream) for stream in streams))
        assert results == [expected_tokens(name, 40) for name in names]
        assert flaky.broken == 1 or direction == "in"  # few frames go in
        assert sorted(engine.submitted) == names
        assert not engine.cancelled
    finally:
        stepping.cancel()
        await server.stop(grace_s=0.1)


async def test_stream_broken_again_and_again_makes_progress() -> None:
    engine = FakeDecode()
    server, flaky = await serve_flaky(engine, lambda where, number: where == "out" and number % 4 == 3)
    stepping = asyncio.create_task(engine.run())
    try:
        async with session_to(server.address) as session, asyncio.timeout(20):
            stream = session.submit(decode_job("a", max_tokens=150), deadline_s=20)
            assert await collect(stream) == expected_tokens("a", 150)
            assert session.reconnects >= 3
        assert flaky.broken >= 3
    finally:
        stepping.cancel()
        await server.stop(grace_s=0.1)


async def test_consumer_that_does_not_read_loses_its_request_and_nobody_else_does() -> None:
    engine = FakeDecode()
    limits = DecodeSessionLimits(bound_tokens=30, acknowledge_s=0.005)
    async with worker(engine) as address, session_to(address, limits=limits) as session:
        slow = session.submit(decode_job("slow", max_tokens=100_000), deadline_s=10)
        quick = session.submit(decode_job("quick", max_tokens=100), deadline_s=10)
        assert await collect(quick) == expected_tokens("quick", 100)
        await until(lambda: engine.cancelled == ["slow"])
        chunk = await anext(slow)
        assert list(chunk.tokens) == expected_tokens("slow", len(chunk.tokens))
        with pytest.raises(Cancelled, match="behind") as raised:
            await anext(slow)
        assert raised.value.tokens_delivered == len(chunk.tokens) > 30


async def test_leaving_a_stream_cancels_its_work() -> None:
    engine = FakeDecode()
    async with worker(engine) as address, session_to(address) as session:
        async with session.submit(decode_job("a", max_tokens=100_000), deadline_s=10) as stream:
            await anext(stream)
        await until(lambda: engine.cancelled == ["a"])
        await until(lambda: engine.sessions.running() == 0)
        assert engine.sessions.kept_tokens() == 0


async def test_cancel_ends_the_stream_and_the_work() -> None:
    engine = FakeDecode()
    async with worker(engine) as address, session_to(address) as session:
        stream = session.submit(decode_job("a", max_tokens=100_000), deadline_s=10)
        await anext(stream)
        session.cancel("a")
        session.cancel("never heard of")
        with pytest.raises(Cancelled):
            await collect_rest(stream)
        await until(lambda: engine.cancelled == ["a"])


async def test_closing_the_session_cancels_its_work_at_once() -> None:
    engine = FakeDecode()
    async with worker(engine) as address:
        async with session_to(address) as session:
            stream = session.submit(decode_job("a", max_tokens=100_000), deadline_s=10)
            await anext(stream)
        assert engine.cancelled == ["a"]
        with pytest.raises(Cancelled):
            await collect_rest(stream)


async def test_deadline_ends_the_stream_and_the_work() -> None:
    engine = FakeDecode()
    async with worker(engine) as address, session_to(address) as session:
        stream = session.submit(decode_job("a", max_tokens=100_000), deadline_s=0.1)
        with pytest.raises(DeadlineExceeded) as raised:
            await collect_rest(stream)
        assert raised.value.tokens_delivered == stream.delivered > 0
        await until(lambda: engine.cancelled == ["a"])


async def test_wrong_token_is_told_to_the_consumer() -> None:
    engine = FakeDecode()
    async with worker(engine) as address, session_to(address, token="x" * 20) as session:
        stream = session.submit(decode_job("a", max_tokens=5), deadline_s=10)
        with pytest.raises(Unauthenticated):
            await collect(stream)
        assert not engine.submitted


async def test_worker_that_stays_away_is_lost_with_the_count_of_delivered_tokens() -> None:
    engine = FakeDecode()
    async with session_to("127.0.0.1:9") as nobody:
        with pytest.raises(WorkerLost):
            await collect(nobody.submit(decode_job("x", max_tokens=5), deadline_s=10))
    async with worker(engine) as address:
        session = session_to(address)
        session.start()
        stream = session.submit(decode_job("a", max_tokens=100_000), deadline_s=10)
        first = await anext(stream)
    with pytest.raises(WorkerLost) as raised:
        await collect_rest(stream)
    assert raised.value.tokens_delivered == stream.delivered >= len(first.tokens)
    assert raised.value.worker == "decode-0"
    with pytest.raises(WorkerLost):
        await collect(session.submit(decode_job("b", max_tokens=5), deadline_s=10))
    await session.close()


async def test_restarted_worker_loses_what_it_had_and_takes_what_it_never_got() -> None:
    engine, second = FakeDecode(incarnation="1"), FakeDecode(incarnation="2")
    async with worker(engine) as address:
        session = session_to(address)
        session.start()
        stream = session.submit(decode_job("a", max_tokens=100_000), deadline_s=10)
        await anext(stream)
    await until(lambda: not session.connected)
    later = session.submit(decode_job("b", max_tokens=10), deadline_s=10)
    async with worker(second, address=address):
        with pytest.raises(WorkerLost):
            await collect_rest(stream)
        assert await collect(later) == expected_tokens("b", 10)
        assert second.submitted == ["b"]
        assert session.incarnation == "2"
        await session.close()


async def test_silent_worker_is_reconnected() -> None:
    # no sign of life within the client's patience: the stream is given up and made anew, the request goes on
    engine = FakeDecode(limits=SessionLimits(sign_of_life_s=60.0))
    limits = DecodeSessionLimits(silence_s=0.1, backoff_min_s=0.005, acknowledge_s=0.005)
    async with worker(engine, step=False) as address, session_to(address, limits=limits) as session:
        stream = session.submit(decode_job("a", max_tokens=3), deadline_s=10)
        await until(lambda: session.reconnects >= 2)
        for _ in range(3):
            engine.step()
        assert await collect(stream) == expected_tokens("a", 3)
        assert engine.submitted == ["a"]


async def test_sign_of_life_keeps_an_idle_stream() -> None:
    engine = FakeDecode(limits=SessionLimits(sign_of_life_s=0.02))
    limits = DecodeSessionLimits(silence_s=0.2)
    async with worker(engine, step=False) as address, session_to(address, limits=limits) as session:
        await until(lambda: session.connected)
        await asyncio.sleep(0.4)
        assert session.connected
        assert session.reconnects == 0


async def test_same_request_id_twice_is_refused() -> None:
    engine = FakeDecode()
    async with worker(engine) as address, session_to(address) as session:
        session.submit(decode_job("a", max_tokens=100_000), deadline_s=10)
        with pytest.raises(ValueError, match="live already"):
            session.submit(decode_job("a", max_tokens=5), deadline_s=10)


async def test_worker_notices_a_router_that_died_and_cancels_what_it_left() -> None:
    engine = FakeDecode(limits=SessionLimits(orphan_grace_s=0.2))
    async with worker(engine) as address:
        channel = open_channel(address)
        call = raw_session(channel, router_id="dead")
        await submit_raw(call, "a")
        await until(lambda: engine.submitted == ["a"])
        await channel.close(None)  # no farewell
        assert engine.cancelled == []
        await until(lambda: engine.cancelled == ["a"])
        assert engine.sessions.kept_tokens() == 0


async def test_router_that_takes_nothing_from_the_stream_costs_a_bounded_number_of_tokens() -> None:
    engine = FakeDecode(limits=SessionLimits(unacknowledged_tokens=100))
    async with worker(engine) as address, session_to(address) as session:
        channel = open_channel(address)
        call = raw_session(channel, router_id="slow")
        await submit_raw(call, "a")
        stream = session.submit(decode_job("b", max_tokens=300), deadline_s=10)
        await until(lambda: engine.cancelled == ["a"])
        assert engine.sessions.kept_tokens() <= 101 + 300
        assert await collect(stream) == expected_tokens("b", 300)
        await channel.close(None)


async def test_second_stream_of_a_router_replaces_the_first_and_goes_on() -> None:
    engine = FakeDecode()
    async with worker(engine, step=False) as address:
        channel = open_channel(address)
        first = raw_session(channel, router_id="r", session="1")
        await submit_raw(first, "a")
        await until(lambda: engine.submitted == ["a"])
        engine.step()
        assert (await tokens_from(first)) == [expected_token("a", 0)]
        second = raw_session(channel, router_id="r", session="1")
        await second.write(second.hello)
        await second.write(decode_pb2.RouterFrame(resume=decode_pb2.Resume(request_id="a", offset=0)))
        assert (await tokens_from(second)) == [expected_token("a", 0)]
        while await first.read() is not grpc.aio.EOF:
            pass
        engine.step()
        assert (await tokens_from(second)) == [expected_token("a", 1)]
        await channel.close(None)


def raw_session(channel: grpc.aio.Channel, *, router_id: str, session: str = "s") -> Any:
    hello = decode_pb2.Hello(router_id=router_id, session=session)
    call = decode_pb2_grpc.DecodeStub(channel).Session(None, metadata=token_metadata(TOKEN), timeout=20)
    call.hello = decode_pb2.RouterFrame(hello=hello)
    return call


async def submit_raw(call: Any, request_id: str) -> None:
    await call.write(call.hello)
    job = decode_job_to_pb(decode_job(request_id, max_tokens=1_000_000))
    await call.write(decode_pb2.RouterFrame(submit=job))


async def tokens_from(call: Any) -> list[int]:
    while True:
        frame = await call.read()
        if frame.WhichOneof("frame") == "step" and frame.step.chunks:
            return list(frame.step.chunks[0].tokens)


@pytest.mark.parametrize("takes_many", [True, False], ids=["now", "an older worker"])
async def test_jobs_that_are_ready_together_share_a_message_if_the_worker_takes_it(takes_many: bool) -> None:
    kinds: list[str | None] = []

    class Noting(DecodeServicer):
        async def Session(  # type: ignore[override]  # noqa: N802
            self, request_iterator: AsyncIterator[decode_pb2.RouterFrame], context: Context
        ) -> None:
            async def noted() -> AsyncIterator[decode_pb2.RouterFrame]:
                async for frame in request_iterator:
                    kinds.append(frame.WhichOneof("frame"))
                    yield frame

            async def write(frame: decode_pb2.DecodeFrame) -> None:
                if frame.HasField("welcome"):
                    frame.welcome.takes_many = takes_many
                await context.write(frame)

            await engine.sessions.attach(noted(), write)

    engine = FakeDecode()
    server = await serve_servicer(
        Noting(engine, engine.sessions), engine.sessions, token=TOKEN, address="127.0.0.1:0"
    )
    async with session_to(server.address) as session:
        await until(lambda: session.connected)
        for name in "abc":
            session.submit(decode_job(name, max_tokens=5), deadline_s=10)
        await until(lambda: len(engine.running) == 3)
        assert kinds == (["hello", "many"] if takes_many else ["hello", "submit", "submit", "submit"])
    await server.stop(grace_s=0)
