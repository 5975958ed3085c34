"""Hand-offs between processes over UCX's TCP, as between two machines, with a peer that hangs or dies."""

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from epdserve.services.errors import ServiceError
from support.engine import greedy, greedy_reference, prompt
from support.pools import DECODE, PREFILL, Pools, engine_table, pools

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.integration]

TCP_ONLY = {"UCX_TLS": "tcp,self"}
DEADLINE_S = 1.5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pools]:
    async with pools(tmp_path_factory.mktemp("pools")) as live:
        prefill = {"engine": engine_table(), "lease_ttl_s": 4.0}
        decode = {"engine": engine_table(), "handoff_deadline_s": DEADLINE_S, "lease_call_deadline_s": 1.0}
        async with asyncio.TaskGroup() as group:
            for n in range(2):
                group.create_task(live.spawn(f"prefill-{n}", PREFILL, TCP_ONLY, **prefill))
            group.create_task(live.spawn("decode-0", DECODE, TCP_ONLY, **decode))
        yield live


async def test_tokens_equal_the_model_alone(live: Pools) -> None:
    tokens, last = await live.generate(prompt(60), greedy(4))
    assert tokens == greedy_reference(prompt(60), 4)
    assert last.receipt is not None
    assert last.receipt.pulled_tokens == 60
    await live.assert_conserved("prefill-0", "decode-0")


async def test_stopped_peer_costs_its_deadline_and_late_bytes_land_in_quarantine(live: Pools) -> None:
    handle = (await live.prefill("prefill-0", prompt(60, 1))).handle
    live.signal("prefill-0", signal.SIGSTOP)
    try:
        tokens, last = await live.decode("decode-0", live.job(prompt(60, 1), greedy(4), handle))
        assert tokens == greedy_reference(prompt(60, 1), 4)
        assert last.receipt is not None
        assert (last.receipt.recomputed_tokens, last.receipt.pulled_tokens) == (60, 0)
        quarantined = 'epdserve_kvstore_pages{phase="quarantined"}'
        assert await live.metric("decode-0", quarantined) == 60 // 8
        assert await live.metric("decode-0", 'epdserve_engine_handoffs_total{outcome="late"}') == 1
        # other requests go on, in other pages
        tokens, _ = await live.decode("decode-0", live.job(prompt(90, 2), greedy(3), None))
        assert tokens == greedy_reference(prompt(90, 2), 3)
    finally:
        live.signal("prefill-0", signal.SIGCONT)
    await live.assert_conserved("prefill-0", "decode-0", within_s=25.0)
    tokens, last = await live.generate(prompt(50, 5), greedy(3))
    assert tokens == greedy_reference(prompt(50, 5), 3)
    assert last.receipt is not None
    assert last.receipt.pulled_tokens == 50


async def test_peer_killed_after_prefill_costs_a_recomputation(live: Pools) -> None:
    handle = (await live.prefill("prefill-1", prompt(60, 3))).handle
    live.signal("prefill-1", signal.SIGKILL)
    tokens, last = await live.decode("decode-0", live.job(prompt(60, 3), greedy(4), handle))
    assert tokens == greedy_reference(prompt(60, 3), 4)
    assert last.receipt is not None
    assert last.receipt.recomputed_tokens == 60
    await live.assert_conserved("decode-0")


async def test_peer_killed_during_prefill_is_an_error_of_its_call(live: Pools) -> None:
    call = asyncio.create_task(live.prefill("prefill-0", prompt(700, 4)))
    await live.until_running("prefill-0")
    live.signal("prefill-0", signal.SIGKILL)
    with pytest.raises(ServiceError):
        await call
