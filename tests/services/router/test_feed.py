from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from epdserve.services.errors import DeadlineExceeded, WorkerLost
from epdserve.services.router.feed import Batch, TokenFeed
from epdserve.services.types import FinishReason, TokenChunk


def later(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def chunks(
    *batches: tuple[int, ...], gap_s: float = 0.0, error: Exception | None = None
) -> AsyncGenerator[TokenChunk, None]:
    offset = 0
    for batch in batches:
        last = batch is batches[-1] and error is None
        yield TokenChunk("r", offset, batch, FinishReason.STOP if last else None)
        offset += len(batch)
        await asyncio.sleep(gap_s)
    if error is not None:
        raise error


async def test_what_is_ready_together_leaves_together() -> None:
    async with TokenFeed([chunks((1,), (2, 3), (4,))], deadline_at=later(), silence_s=5.0) as feed:
        await asyncio.sleep(0.01)
        assert await feed.take() == [Batch(0, [1, 2, 3, 4], finish_reason=FinishReason.STOP)]


async def test_silence_is_told_and_the_stream_goes_on() -> None:
    async with TokenFeed([chunks((1,), (2,), gap_s=0.05)], deadline_at=later(), silence_s=0.03) as feed:
        assert await feed.take() == [Batch(0, [1])]
        assert await feed.take() is None
        assert await feed.take() == [Batch(0, [2], finish_reason=FinishReason.STOP)]


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    async with TokenFeed(
        [chunks((1,), (2,), error=WorkerLost("gone"))], deadline_at=later(), silence_s=5.0
    ) as feed:
        await asyncio.sleep(0.01)
        assert await feed.take() == [Batch(0, [1, 2])]
        with pytest.raises(WorkerLost):
            await feed.take()


async def test_the_deadline_ends_the_stream() -> None:
    async with TokenFeed([chunks((1,), (2,), gap_s=60)], deadline_at=later(0.02), silence_s=5.0) as feed:
        assert await feed.take() == [Batch(0, [1])]
        with pytest.raises(DeadlineExceeded):
            await feed.take()


async def test_leaving_closes_the_stream_and_waits_for_it() -> None:
    closed = False

    async def endless() -> AsyncGenerator[TokenChunk, None]:
        nonlocal closed
        try:
            while True:
                yield TokenChunk("r", 0, (1,))
                await asyncio.sleep(0.001)
        finally:
            await asyncio.sleep(0.01)
            closed = True

    async with TokenFeed([endless()], deadline_at=later(), silence_s=5.0) as feed:
        await feed.take()
    assert closed


async def test_a_bug_in_the_stream_comes_out_at_the_end() -> None:
    async def consume() -> None:
        async with TokenFeed(
            [chunks((1,), error=KeyError("bug"))], deadline_at=later(), silence_s=5.0
        ) as feed:
            await feed.take()
            await feed.take()

    with pytest.raises(KeyError):
        await asyncio.wait_for(consume(), 1)


async def test_choices_come_apart_and_one_may_be_left() -> None:
    streams = [chunks((1,), (2,), gap_s=0.005), chunks((7,), (8,), gap_s=60)]
    got: dict[int, list[int]] = {0: [], 1: []}
    async with TokenFeed(streams, deadline_at=later(), silence_s=5.0) as feed:
        while len(got[0]) < 2:
            for batch in await feed.take() or ():
                got[batch.choice] += batch.tokens
        feed.leave(1)
    assert got == {0: [1, 2], 1: [7]}
