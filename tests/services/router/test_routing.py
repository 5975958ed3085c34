from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from epdserve.kvstore.hashing import prefix_hash_chain
from epdserve.services.errors import Unavailable
from epdserve.services.policy.forecast import fixed
from epdserve.services.router.ledger import InFlight, InFlightLedger
from epdserve.services.router.routing import Placer, Route
from epdserve.services.router.snapshot import fetch_speeds
from epdserve.services.types import WorkerInfo, WorkerRole, WorkerState, token_ids
from support.fake_cluster import ROOT, FakeCluster, worker_info

PROMPT = token_ids(range(200))
KEY = b"k" * 32


def pool(*, prefills: int = 3, decodes: int = 3) -> list[WorkerInfo]:
    return [
        *(worker_info(f"p{n}", WorkerRole.PREFILL, machine=f"m{n}") for n in range(prefills)),
        *(worker_info(f"d{n}", WorkerRole.DECODE, machine=f"m{n}") for n in range(decodes)),
    ]


async def placed(cluster: FakeCluster, ledger: InFlightLedger | None = None, request_id: str = "r") -> Route:
    placer = Placer(cluster, ledger or InFlightLedger())
    return await placer.place(PROMPT, tenant_key=KEY, forecast=fixed(100), request_id=request_id)


async def test_ties_go_to_the_first_name_whatever_the_order_of_the_view() -> None:
    route = await placed(FakeCluster(infos=pool()[::-1]))
    assert (route.prefill.worker, route.decode.worker) == ("p0", "d0")


async def test_a_hit_in_pages_beats_one_in_the_store_and_that_beats_none() -> None:
    infos = [*pool(), *(worker_info(f"s{n}", WorkerRole.STORE, machine=f"m{n}") for n in range(3))]
    chain = prefix_hash_chain(PROMPT, block_tokens=16, root=ROOT, tenant_key=KEY)
    cluster = FakeCluster(infos=infos)
    cluster.held = {key: {"s1"} for key in chain}
    route = await placed(cluster)
    assert (route.prefill.worker, route.hit_tokens) == ("p1", 192)
    cluster.held = {key: {"s1", "p2"} for key in chain}
    assert (await placed(cluster)).prefill.worker == "p2"


async def test_the_busy_the_full_and_the_hanging_are_passed_over() -> None:
    infos = pool()
    infos[0] = replace(infos[0], queued_tokens=50_000)
    infos[1] = replace(infos[1], step_age_s=30.0)
    infos[3] = replace(infos[3], free_pages=1)
    infos[4] = replace(infos[4], running=40)
    route = await placed(FakeCluster(infos=infos))
    assert (route.prefill.worker, route.decode.worker) == ("p2", "d2")


async def test_what_other_routers_sent_counts() -> None:
    ledger = InFlightLedger()
    ledger.hear({"p0": InFlight(1, 40_000), "d0": InFlight(30, 3000, 9000.0)}, routers=1)
    routes = [await placed(FakeCluster(infos=pool()), ledger, str(n)) for n in range(30)]
    assert {route.prefill.worker for route in routes} <= {"p1", "p2"}
    ledger.hear({}, routers=0)
    assert (await placed(FakeCluster(infos=pool()), ledger)).prefill.worker == "p0"


async def test_routers_that_know_each_other_do_not_all_run_to_one_worker() -> None:
    ledger = InFlightLedger()
    ledger.hear({}, routers=1)
    cluster = FakeCluster(infos=pool(prefills=4))
    decodes = Counter([(await placed(cluster, ledger, str(n))).decode.worker for n in range(60)])
    assert len(decodes) == 3
    assert max(decodes.values()) < 40


async def test_the_decision_tells_the_candidates_and_their_costs() -> None:
    decision = (await placed(FakeCluster(infos=pool()))).decision
    assert decision is not None
    pairs = decision.explain()
    assert len(pairs) == 9
    assert pairs[0] == decision.chosen
    assert [pair.cost for pair in pairs] == sorted(pair.cost for pair in pairs)


async def test_no_pair_of_one_layout_is_told() -> None:
    infos = pool(prefills=1, decodes=1)
    other = [infos[0], replace(infos[1], cache_root=b"o" * 32)]
    draining = [infos[0], replace(infos[1], state=WorkerState.DRAINING)]
    with pytest.raises(Unavailable, match="matching"):
        await placed(FakeCluster(infos=other))
    with pytest.raises(Unavailable, match="decode"):
        await placed(FakeCluster(infos=draining))


def test_the_ledger_forgets_who_has_nothing_left() -> None:
    ledger = InFlightLedger()
    with ledger.hold("d0", 100, output_tokens=50.0), ledger.hold("d0", 10):
        assert (ledger.tokens("d0"), ledger.requests("d0"), ledger.output_tokens("d0")) == (110, 2, 50.0)
    assert not ledger.own


async def test_a_sole_pair_is_explained_with_what_is_expected_of_it_when_asked() -> None:
    placer = Placer(FakeCluster(infos=pool(prefills=1, decodes=1)), InFlightLedger())
    route = await placer.place(PROMPT, tenant_key=KEY, forecast=fixed(100), request_id="r")
    before = placer.explain("r")
    assert before is not None
    assert [(one.prefill, one.decode) for one in before] == [("p0", "d0")]
    assert route.decision is not None
    assert route.hit_tokens == route.decision.chosen.hit_tokens == 0
    with placer.ledger.hold("p0", 500_000):
        after = placer.explain("r")
    assert after is not None
    assert after[0].ttft_s > before[0].ttft_s


async def test_a_sole_pair_counts_on_its_pages_and_on_the_store_where_that_holds_more() -> None:
    infos = [*pool(prefills=1, decodes=1), worker_info("s0", WorkerRole.STORE, machine="m0")]
    cluster = FakeCluster(infos=infos)
    chain = prefix_hash_chain(PROMPT, block_tokens=16, root=ROOT, tenant_key=KEY)
    cluster.held = {key: {"p0"} for key in chain[:4]}
    assert (await placed(cluster)).hit_tokens == 64
    cluster.held = {key: {"p0", "s0"} if at < 4 else {"s0"} for at, key in enumerate(chain)}
    assert (await placed(cluster)).hit_tokens == 192


async def test_placement_in_turn_looks_at_nothing_and_takes_everyone() -> None:
    infos = pool(prefills=2)
    infos[0] = replace(infos[0], queued_tokens=50_000)
    placer = Placer(FakeCluster(infos=infos), InFlightLedger(), in_turn=True)
    routes = [await placer.place(PROMPT, tenant_key=KEY, forecast=fixed(100)) for _ in range(6)]
    names = [(route.prefill.worker, route.decode.worker) for route in routes]
    assert names == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0"), ("p0", "d1"), ("p1", "d2")]


def test_tiers_are_as_fast_as_workers_measured_them() -> None:
    unknown = fetch_speeds(pool()[:2])
    assert unknown[1:].tolist() == [[2e9, 2e9], [1e9, 1e9]]
    told = worker_info(
        "p", WorkerRole.PREFILL, host_bytes_per_s=8e9, ssd_bytes_per_s=4e6, peer_bytes_per_s=2e6
    )
    odd = [replace(told, host_bytes_per_s=0.0, ssd_bytes_per_s=speed) for speed in (float("nan"), -1.0, 0.0)]
    # The slower tier in use counts; who measured nothing, or says nonsense, is taken to be like the others
    assert fetch_speeds([told, *odd, *pool()[:1]])[1:].tolist() == [[4e6] * 5, [2e6] * 5]


async def test_a_store_that_was_measured_to_be_slow_draws_no_prompts() -> None:
    infos = [*pool(prefills=2), worker_info("s1", WorkerRole.STORE, machine="m1")]
    cluster = FakeCluster(infos=infos)
    chain = prefix_hash_chain(PROMPT, block_tokens=16, root=ROOT, tenant_key=KEY)
    cluster.held = {key: {"s1"} for key in chain}
    assert (await placed(cluster)).prefill.worker == "p1"
    infos[1] = replace(infos[1], ssd_bytes_per_s=1e5, peer_bytes_per_s=1e5)
    cluster.infos = infos
    route = await placed(cluster)
    assert (route.prefill.worker, route.hit_tokens) == ("p0", 0)
