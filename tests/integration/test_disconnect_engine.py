"""Whoever asked goes away: at any moment, and everything is free at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from epdserve.services.errors import DeadlineExceeded
from epdserve.services.rpc.decode_session import DecodeSession
from epdserve.services.types import PrefillJob
from support.engine import greedy, prompt
from support.pools import DECODE, PREFILL, TOKEN, Pools, engine_table, pools

pytestmark = pytest.mark.asyncio(loop_scope="module")

FREE_WITHIN_S = 10.0  # what leaks never comes back; how soon it comes is a matter for benchmarks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pools]:
    async with pools(tmp_path_factory.mktemp("pools")) as live:
        await live.start("prefill-0", PREFILL, engine=engine_table(chunk_tokens=16))
        await live.start("decode-0", DECODE, engine=engine_table(chunk_tokens=16))
        yield live


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
async def test_cancelled_prefill_call_frees_everything(live: Pools, delay_s: float) -> None:
    call = asyncio.create_task(live.prefill("prefill-0", prompt(600)))
    await asyncio.sleep(delay_s)
    if delay_s:
        await live.until_running("prefill-0")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await live.assert_conserved("prefill-0", within_s=FREE_WITHIN_S)


async def test_deadline_of_a_prefill_call_frees_everything(live: Pools) -> None:
    client = await live.client("prefill-0")
    job = live.job(prompt(600, 1), greedy(1), None)
    with pytest.raises(DeadlineExceeded):
        await client.run(PrefillJob(job.request_id, job.tokens, job.tenant_key), deadline_s=0.05)
    await live.assert_conserved("prefill-0", within_s=FREE_WITHIN_S)


async def test_stream_left_while_decoding_frees_everything(live: Pools) -> None:
    handle = (await live.prefill("prefill-0", prompt(40, 2))).handle
    session = await live.session("decode-0")
    async with session.submit(live.job(prompt(40, 2), greedy(500), handle), deadline_s=20.0) as stream:
        await anext(aiter(stream))
    await live.assert_conserved("decode-0", "prefill-0", within_s=FREE_WITHIN_S)


async def test_stream_left_while_the_prompt_is_computed_frees_everything(live: Pools) -> None:
    session = await live.session("decode-0")
    async with session.submit(live.job(prompt(600, 3), greedy(5), None), deadline_s=20.0):
        await live.until_running("decode-0")
    await live.assert_conserved("decode-0", within_s=FREE_WITHIN_S)


async def test_stream_left_before_it_began_gives_the_lease_back(live: Pools) -> None:
    handle = (await live.prefill("prefill-0", prompt(40, 4))).handle
    session = await live.session("decode-0")
    async with session.submit(live.job(prompt(40, 4), greedy(5), handle), deadline_s=20.0):
        await asyncio.sleep(0.01)
    await live.assert_conserved("decode-0", "prefill-0", within_s=FREE_WITHIN_S)


async def test_router_that_dies_has_its_requests_cancelled(live: Pools) -> None:
    """A new life under the same name ends what the former left."""
    info = await live.listed("decode-0")
    former = DecodeSession(info.address, token=TOKEN, router_id="mortal", session="1")
    former.start()
    stream = former.submit(live.job(prompt(20, 5), greedy(500), None), deadline_s=60.0)
    await anext(aiter(stream))
    assert former._task is not None
    former._task.cancel()  # no farewell
    async with DecodeSession(info.address, token=TOKEN, router_id="mortal", session="2") as latter:
        answer = latter.submit(live.job(prompt(9, 6), greedy(2), None), deadline_s=20.0)
        assert [token async for chunk in answer for token in chunk.tokens]
        await live.assert_conserved("decode-0", within_s=FREE_WITHIN_S)
