from __future__ import annotations

import pytest
from epdserve.services.errors import Overloaded
from epdserve.services.policy.forecast import fixed
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.foresight import Foresight, SloSettings
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.routing import Placer, Route
from epdserve.services.sampling import SamplingParams
from epdserve.services.types import WorkerRole, token_ids
from support.fake_cluster import FakeCluster, worker_info

PROMPT = token_ids(range(100))


def request(tenant: bytes = b"t" * 32) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        tokens=PROMPT,
        tenant_key=tenant,
        sampling=SamplingParams(max_tokens=100, seed=1),
        deadline_at=1e9,
    )


async def route_at(queued_tokens: int) -> Route:
    infos = [
        worker_info("p0", WorkerRole.PREFILL, queued_tokens=queued_tokens),
        worker_info("d0", WorkerRole.DECODE),
    ]
    placer = Placer(FakeCluster(infos=infos), InFlightLedger())
    return await placer.place(PROMPT, tenant_key=b"t" * 32, forecast=fixed(100), request_id="r")


def foresight(**settings: float) -> Foresight:
    return Foresight(SloSettings(refuse_late=True, **settings), Estimates(), clock=lambda: 0.0)  # type: ignore[arg-type]


async def test_what_will_be_in_time_enters_and_what_will_not_is_told_when_to_come() -> None:
    seer = foresight()
    seer.admit(request(), await route_at(0), fixed(100))
    # 60,000 tokens at the 10,000/s taken until something was measured: 6 s, of which 2 are granted
    with pytest.raises(Overloaded) as refusal:
        seer.admit(request(), await route_at(60_000), fixed(100))
    assert 4 <= (refusal.value.retry_after_s or 0) <= 6
    assert seer.refused == {"ttft": 1, "tpot": 0, "share": 0}


async def test_it_is_off_unless_asked_for() -> None:
    Foresight(SloSettings(), Estimates()).admit(request(), await route_at(10**7), fixed(100))


async def test_near_the_limit_the_tenant_with_more_than_its_share_gives_way() -> None:
    seer, calm, busy, full = foresight(), await route_at(0), await route_at(18_500), await route_at(60_000)
    for _ in range(9):
        seer.admit(request(b"g" * 32), calm, fixed(100))
    seer.admit(request(b"g" * 32), busy, fixed(100))  # nobody has been refused: nobody is short of anything
    for _ in range(10):
        with pytest.raises(Overloaded):
            seer.admit(request(b"m" * 32), full, fixed(100))
    with pytest.raises(Overloaded):
        seer.admit(request(b"g" * 32), busy, fixed(100))
    assert seer.refused["share"] == 1
    seer.admit(request(b"m" * 32), busy, fixed(100))


async def test_a_decision_is_explained_while_it_is_remembered() -> None:
    infos = [worker_info("p0", WorkerRole.PREFILL), worker_info("d0", WorkerRole.DECODE)]
    placer = Placer(FakeCluster(infos=infos), InFlightLedger())
    for number in range(600):
        await placer.place(PROMPT, tenant_key=b"t" * 32, forecast=fixed(9), request_id=str(number))
    pairs = placer.explain("599")
    assert pairs is not None
    assert [(pair.prefill, pair.decode) for pair in pairs] == [("p0", "d0")]
    assert placer.explain("0") is None
