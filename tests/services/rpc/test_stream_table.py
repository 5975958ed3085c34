from __future__ import annotations

import asyncio

import pytest
from epdserve.services.errors import Internal, WorkerLost
from epdserve.services.rpc.convert import chunk_to_pb
from epdserve.services.rpc.decode_stream import DecodeStream
from epdserve.services.rpc.pb import decode_pb2
from epdserve.services.rpc.stream_table import StreamTable, gathered
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import FinishReason, TokenChunk
from support.fake_decode import decode_job


def add(table: StreamTable, request_id: str) -> DecodeStream:
    deadline_at = asyncio.get_running_loop().time() + 10
    job = decode_job(request_id, max_tokens=100)
    stream = DecodeStream(job, deadline_at=deadline_at, bound_tokens=100, leave=table.leave)
    table.add(stream)
    return stream


def step(*chunks: TokenChunk) -> decode_pb2.DecodeFrame:
    return decode_pb2.DecodeFrame(step=decode_pb2.Step(chunks=[chunk_to_pb(chunk) for chunk in chunks]))


def kinds(table: StreamTable) -> list[str | None]:
    return [frame.WhichOneof("frame") for frame in table.control_frames()]


async def test_duplicates_and_overlaps_are_dropped() -> None:
    table = StreamTable(worker="w")
    stream = add(table, "a")
    for offset, tokens in [(0, (1, 2)), (0, (1, 2)), (1, (2, 3)), (0, (1,))]:
        table.take(step(TokenChunk("a", offset, tokens)))
    assert (await anext(stream)).tokens == (1, 2, 3)
    table.take(step(TokenChunk("a", 0, (1, 2, 3), FinishReason.STOP)))
    table.take(step(TokenChunk("a", 0, (1, 2, 3), FinishReason.STOP)))
    assert (await anext(stream)).tokens == ()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_logprobs_stay_beside_their_tokens() -> None:
    table = StreamTable(worker="w")
    stream = add(table, "a")
    told = [TokenLogprob(-float(n), ((n, -float(n)),)) for n in range(4)]
    table.take(step(TokenChunk("a", 0, (0, 1), logprobs=(told[0], told[1]))))
    table.take(step(TokenChunk("a", 1, (1, 2), logprobs=(told[1], told[2]))))
    assert (await anext(stream)).logprobs == tuple(told[:3])
    table.take(step(TokenChunk("a", 2, (2, 3), FinishReason.STOP, logprobs=(told[2], told[3]))))
    last = await anext(stream)
    assert (last.tokens, last.logprobs, last.finish_reason) == ((3,), (told[3],), FinishReason.STOP)


async def test_gap_is_asked_for_again() -> None:
    table = StreamTable(worker="w")
    stream = add(table, "a")
    assert kinds(table) == ["submit"]
    table.take(step(TokenChunk("a", 0, (1,))))
    table.take(step(TokenChunk("a", 5, (6,))))
    (frame,) = table.control_frames()
    assert (frame.resume.request_id, frame.resume.offset) == ("a", 1)
    assert stream.received == 1


async def test_output_of_a_request_that_was_left_is_cancelled_again() -> None:
    table = StreamTable(worker="w")
    stream = add(table, "a")
    kinds(table)
    await stream.aclose()
    assert kinds(table) == ["cancel"]
    table.take(step(TokenChunk("a", 0, (1,))))
    assert kinds(table) == ["cancel"]


async def test_request_left_before_it_was_sent_is_never_sent() -> None:
    table = StreamTable(worker="w")
    stream = add(table, "a")
    await stream.aclose()
    assert kinds(table) == []


async def test_unknown_request_is_sent_again_only_if_nothing_of_it_came() -> None:
    table = StreamTable(worker="w")
    new, old = add(table, "new"), add(table, "old")
    assert kinds(table) == ["submit", "submit"]
    table.take(step(TokenChunk("old", 0, (1,))))
    for name in ("new", "old", "other"):
        table.take(decode_pb2.DecodeFrame(unknown=decode_pb2.Unknown(request_id=name)))
    assert kinds(table) == ["submit"]
    assert not new.ended
    assert (await anext(old)).tokens == (1,)
    with pytest.raises(WorkerLost) as raised:
        await anext(old)
    assert raised.value.tokens_delivered == 1


async def test_acknowledgements_are_gathered() -> None:
    table = StreamTable(worker="w")
    add(table, "a")
    add(table, "b")
    kinds(table)
    for offset in range(5):
        table.take(step(TokenChunk("a", offset, (1,)), TokenChunk("b", offset, (1,))))
    table.take(step(TokenChunk("b", 5, (), FinishReason.STOP)))
    acks = table.ack_frame().acks.acks
    assert [(ack.request_id, ack.offset, ack.final) for ack in acks] == [("a", 5, False), ("b", 5, True)]
    assert not table.acks_waiting


async def test_end_before_what_has_come_is_an_error() -> None:
    table = StreamTable(worker="w")
    stream = add(table, "a")
    table.take(step(TokenChunk("a", 0, (1, 2, 3))))
    table.take(step(TokenChunk("a", 0, (1,), FinishReason.STOP)))
    await anext(stream)
    with pytest.raises(Internal):
        await anext(stream)


async def test_frame_that_means_nothing_is_refused() -> None:
    table = StreamTable(worker="w")
    with pytest.raises(Internal, match="welcome"):
        table.take(decode_pb2.DecodeFrame(welcome=decode_pb2.Welcome()))


async def test_frames_share_messages_up_to_a_size() -> None:
    table = StreamTable(worker="w")
    for name in "abc":
        add(table, name)
    (message,) = gathered(table.control_frames())
    assert [frame.submit.request_id for frame in message.many.frames] == ["a", "b", "c"]
    large = decode_pb2.RouterFrame(submit=decode_pb2.DecodeJob(request_id="x", tokens=bytes(2**20)))
    small = decode_pb2.RouterFrame(cancel=decode_pb2.Cancel(request_id="y"))
    assert list(gathered([small])) == [small]
    first, second = gathered([small, large, small])
    assert list(first.many.frames) == [small, large]
    assert second == small
    assert not list(gathered([]))
