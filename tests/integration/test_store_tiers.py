"""Workers and the store of their machine, real servers and NIXL: what one worker computed, another one finds."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from epdserve.services.policy.fetching import UNKNOWN, Speeds
from epdserve.services.types import PrefillResult, TokenSources
from support.engine import Reference, greedy, greedy_reference, prompt
from support.golden import TINY, tiny
from support.pools import DECODE, PREFILL, STORE, Pools, engine_table, pools

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

WINDOW = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pools]:
    async with pools(tmp_path_factory.mktemp("tiers")) as live:
        await live.start("store-0", STORE, **store_table(live.folder / "ssd"))
        for worker, module in (("prefill-0", PREFILL), ("prefill-1", PREFILL), ("decode-0", DECODE)):
            await start(live, worker, module)
        yield live


async def start(live: Pools, worker: str, module: str) -> None:
    """A worker that always fetches: what is quicker depends on the machine that tests run on."""
    await live.start(
        worker, module, engine=engine_table(store={"call_deadline_s": 10.0, "transfer_deadline_s": 20.0})
    )
    desk = live.runners[worker]._service._desk  # type: ignore[union-attr]
    desk.speeds.speeds = lambda: Speeds(UNKNOWN, {})


def store_table(folder: Path, **changes: object) -> dict[str, object]:
    return {
        "model_dir": str(TINY),
        "block_tokens": 8,
        "host_bytes": 4 * 2**20,
        "ssd": {"directories": [{"folder": str(folder), "capacity_bytes": 2**22}]},
        **changes,
    }


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def nothing_leaks(live: Pools) -> AsyncIterator[None]:
    yield
    await live.assert_conserved("prefill-0", "prefill-1", "decode-0", within_s=20.0)


async def prefill(live: Pools, worker: str, tokens: np.ndarray, **more: object) -> PrefillResult:
    """Prefill, let go of the answer, and wait until the store has what was sealed."""
    result = await live.prefill(worker, tokens, **more)  # type: ignore[arg-type]
    client = await live.client(worker)
    handle = result.handle
    assert await client.release_lease(handle.lease, incarnation=handle.incarnation, deadline_s=20.0)
    await stored(live, worker)
    return result


async def stored(live: Pools, worker: str) -> None:
    """Wait until nothing is on its way to the store."""
    async with asyncio.timeout(30):
        while await live.metric(worker, "epdserve_engine_offload_pending_bytes"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_one_worker_sealed_another_one_gets_from_the_host_cache(live: Pools) -> None:
    await prefill(live, "prefill-0", prompt(64, 1))
    longer = np.concatenate([prompt(64, 1), prompt(13, 2)])
    result = await prefill(live, "prefill-1", longer)
    assert result.sources == TokenSources(host=64, computed=13)
    assert (result.cached_tokens, result.replayed_rows) == (64, WINDOW)
    again = await prefill(live, "prefill-1", np.concatenate([prompt(64, 1), prompt(9, 3)]))
    assert again.sources == TokenSources(device=64, computed=9)


async def test_a_hit_from_the_store_gives_the_tokens_of_a_hit_in_own_pages(live: Pools) -> None:
    await prefill(live, "prefill-0", prompt(64, 5))
    longer = np.concatenate([prompt(64, 5), prompt(13, 6)])
    result = await live.prefill("prefill-1", longer)
    assert result.sources.host == 64
    tokens, _ = await live.decode("decode-0", live.job(longer, greedy(6), result.handle))
    reference = Reference(tiny("f32q"), 90)
    reference.prefill(prompt(64, 5))
    assert tokens == reference.greedy(longer, 6, hit=64)


async def test_a_tail_before_the_end_lets_the_next_turn_go_on_there(live: Pools) -> None:
    turn = prompt(70, 11)
    await prefill(live, "prefill-0", turn, tail_at=69)
    longer = np.concatenate([turn[:69], prompt(20, 12)])
    result = await prefill(live, "prefill-1", longer)
    assert result.sources == TokenSources(host=64, tail=5, computed=20)
    assert result.replayed_rows == 0


async def test_the_next_turn_hits_the_answer_and_its_tail_exactly(live: Pools) -> None:
    """Blocks that decoding filled and the tail at its end, on a worker that has seen neither."""
    question = prompt(45, 21)
    result = await live.prefill("prefill-0", question, exact=True)
    job = live.job(question, greedy(22), result.handle, exact=True)
    answer, _ = await live.decode("decode-0", job)
    await stored(live, "prefill-0")
    await stored(live, "decode-0")
    turn = np.concatenate([question, answer, prompt(10, 22)])
    end = 45 + 22 - 1  # the token drawn last was not run
    second = await live.prefill("prefill-1", turn, exact=True)
    assert second.sources == TokenSources(host=end - end % 8, tail=end % 8, computed=11)
    tokens, _ = await live.decode("decode-0", live.job(turn, greedy(5), second.handle, exact=True))
    assert tokens == greedy_reference(turn, 5, exact=True)


async def test_a_tail_is_not_kept_where_nobody_will_ask_for_it(live: Pools) -> None:
    question = prompt(30, 25)
    result = await live.prefill("prefill-0", question)
    job = live.job(question, greedy(10), result.handle, keep_tail=False)
    answer, _ = await live.decode("decode-0", job)
    await stored(live, "decode-0")
    turn = np.concatenate([question, answer, prompt(10, 26)])
    second = await prefill(live, "prefill-1", turn)
    assert second.sources.tail == 0
    assert second.sources.host == 32


async def test_exact_requests_run_a_halo_after_blocks_from_the_store(live: Pools) -> None:
    await prefill(live, "prefill-0", prompt(160, 31), exact=True)
    longer = np.concatenate([prompt(160, 31), prompt(30, 32)])
    result = await live.prefill("prefill-1", longer, exact=True)
    assert result.sources.host == 160
    assert result.replayed_rows == 55
    tokens, _ = await live.decode("decode-0", live.job(longer, greedy(4), result.handle, exact=True))
    assert tokens == greedy_reference(longer, 4, exact=True)


async def test_tainted_blocks_of_the_store_are_none_for_exact_requests(live: Pools) -> None:
    await prefill(live, "prefill-0", prompt(64, 41))
    turn = np.concatenate([prompt(64, 41), prompt(100, 42)])
    await prefill(live, "prefill-0", turn)  # replays, so what follows is tainted
    result = await prefill(live, "prefill-1", np.concatenate([turn, prompt(9, 43)]), exact=True)
    assert result.sources == TokenSources(host=64, computed=109)
    assert all(block.exact for block in result.handle.blocks)


async def test_a_decode_worker_without_a_handle_takes_durable_blocks(live: Pools) -> None:
    """As after a death: prompt and delivered tokens, no prefill worker asked."""
    question = prompt(60, 51)
    wanted = greedy_reference(question, 40, exact=True)
    result = await live.prefill("prefill-0", question, exact=True)
    job = live.job(question, greedy(33), result.handle, exact=True)
    delivered, _ = await live.decode("decode-0", job)
    await stored(live, "prefill-0")
    await stored(live, "decode-0")
    await start(live, "decode-1", DECODE)
    job = live.job(question, greedy(40), None, emitted=delivered[:30], exact=True)
    tokens, last = await live.decode("decode-1", job)
    assert delivered[:30] + tokens == wanted
    assert last.receipt is not None
    # the tail at the end of the 33 lies beyond what was delivered: a halo of all layers is run
    assert last.receipt.sources == TokenSources(host=88, computed=2)


async def test_blocks_come_back_from_the_disk_after_the_store_was_restarted(live: Pools) -> None:
    await prefill(live, "prefill-0", prompt(64, 61))
    await live.stop("store-0")
    without = await prefill(live, "prefill-1", np.concatenate([prompt(64, 61), prompt(5, 62)]))
    assert without.sources == TokenSources(computed=69)
    await live.start("store-0", STORE, **store_table(live.folder / "ssd"))
    await start(live, "prefill-2", PREFILL)
    result = await prefill(live, "prefill-2", np.concatenate([prompt(64, 61), prompt(9, 63)]))
    assert result.sources == TokenSources(ssd=64, computed=9)
