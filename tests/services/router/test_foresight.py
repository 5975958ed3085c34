from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from epdserve.services.errors import Overloaded
from epdserve.services.policy.forecast import fixed
from epdserve.services.router.estimates import Estimates
from epdserve.services.router.foresight import Foresight, LessEffort
from epdserve.services.router.ledger import InFlightLedger
from epdserve.services.router.request import GenerateRequest, now
from epdserve.services.router.routing import Placer, Route
from epdserve.services.router.slo import ClassSettings, SloSettings, SloWish, promised
from epdserve.services.sampling import SamplingParams
from epdserve.services.types import Effort, FinishReason, WorkerRole, token_ids
from support.fake_cluster import FakeCluster, worker_info

PROMPT = token_ids(range(100))


def request(tenant: str = "t", **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"request_id": "r", "tenant": tenant, "slo": SloSettings().usual, **changes}
    return GenerateRequest(
        tokens=PROMPT,
        tenant_key=b"t" * 32,
        sampling=SamplingParams(max_tokens=100, seed=1),
        deadline_at=1e9,
        **fields,
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


async def test_what_asks_for_targets_or_a_class_is_refused_late_in_any_case() -> None:
    seer, busy = Foresight(SloSettings(), Estimates()), await route_at(30_000)
    seer.admit(request(), busy, fixed(100))
    tight = promised(SloWish(ttft_target_s=1.0), SloSettings())
    with pytest.raises(Overloaded):
        seer.admit(request(slo=tight, slo_asked=True), busy, fixed(100))
    loose = promised(SloWish("batch"), SloSettings())
    seer.admit(request(slo=loose, slo_asked=True), busy, fixed(100))


async def test_classes_are_shed_one_after_the_other() -> None:
    settings = SloSettings(
        classes={"second": ClassSettings(ttft_target_s=2.0, tpot_target_s=0.05, room=0.5)}, refuse_late=True
    )
    second = promised(SloWish("second"), settings)
    seer = Foresight(settings, Estimates())
    fates = []
    for queued in (0, 15_000, 40_000):
        route = await route_at(queued)
        for slo in (settings.usual, second):
            try:
                seer.admit(request(slo=slo), route, fixed(100))
                fates.append(True)
            except Overloaded:
                fates.append(False)
    assert fates == [True, True, True, False, False, False]


async def test_near_the_limit_the_tenant_with_more_than_its_share_gives_way() -> None:
    seer, calm, busy, full = foresight(), await route_at(0), await route_at(18_500), await route_at(60_000)
    for _ in range(9):
        seer.admit(request("greedy"), calm, fixed(100))
    seer.admit(request("greedy"), busy, fixed(100))  # nobody has been refused: nobody is short of anything
    for _ in range(10):
        with pytest.raises(Overloaded):
            seer.admit(request("modest"), full, fixed(100))
    with pytest.raises(Overloaded):
        seer.admit(request("greedy"), busy, fixed(100))
    assert seer.refused["share"] == 1
    seer.admit(request("greedy"), calm, fixed(100))  # where nobody waits, shares do not count
    seer.admit(request("modest"), busy, fixed(100))
    assert seer.schedule(request("greedy"), fixed(100)).excess > 0.2
    assert seer.schedule(request("modest"), fixed(100)).excess < 0


async def test_a_tenant_of_more_weight_may_have_more() -> None:
    seer = Foresight(SloSettings(weights={"big": 9.0}), Estimates(), clock=lambda: 0.0)
    calm = await route_at(0)
    for _ in range(9):
        seer.admit(request("big"), calm, fixed(100))
    for _ in range(3):
        seer.admit(request("small"), calm, fixed(100))
    assert seer.schedule(request("big"), fixed(100)).excess <= 0


async def test_what_an_answer_really_took_is_what_counts() -> None:
    seer, calm = foresight(), await route_at(0)
    for name in ("a", "b"):
        seer.admit(request(name, request_id=name), calm, fixed(1000))
    before = seer.meter.snapshot(now=0.0)
    assert before["a"] == before["b"]
    seer.answered(request("a", request_id="a"), 10)
    after = seer.meter.snapshot(now=0.0)
    assert after["b"] == before["b"]
    assert after["a"][1] < before["a"][1] / 5


async def test_a_schedule_says_what_was_promised_and_what_is_expected() -> None:
    seer = foresight()
    told = seer.schedule(request(priority=3, slo=promised(SloWish("standard"), SloSettings())), fixed(77))
    assert (told.target_s, told.priority, told.lengths, told.waited_s) == (6.0, 3, (77.0,), 0.0)
    assert seer.schedule(request(received_at=now() - 1.5), fixed(9)).waited_s == pytest.approx(1.5, abs=0.5)


async def test_less_effort_is_granted_where_decoding_is_short_and_it_pays() -> None:
    estimates = Estimates()
    for effort, tokens in ((100, 4000), (25, 100)):
        for _ in range(40):
            estimates.answered(request(effort=Effort(effort)), tokens, FinishReason.STOP)
    seer = Foresight(SloSettings(refuse_late=True, tpot_target_s=0.001), estimates)
    slow = promised(SloWish(), SloSettings(tpot_target_s=0.001))
    wanted = request(effort=Effort(100), effort_floor=Effort(25), slo=slow)
    route, forecast = await route_at(0), estimates.forecast(wanted)
    with pytest.raises(LessEffort):
        seer.admit(wanted, route, forecast)
    with pytest.raises(Overloaded) as refusal:
        seer.admit(replace(wanted, turn=2), route, forecast)  # a conversation keeps its effort
    assert not isinstance(refusal.value, LessEffort)
    with pytest.raises(Overloaded) as refusal:
        seer.admit(wanted, await route_at(60_000), forecast)  # less output shortens no queue of prompts
    assert not isinstance(refusal.value, LessEffort)
    assert seer.lowered == 1


async def test_a_decision_is_explained_while_it_is_remembered() -> None:
    infos = [worker_info("p0", WorkerRole.PREFILL), worker_info("d0", WorkerRole.DECODE)]
    placer = Placer(FakeCluster(infos=infos), InFlightLedger())
    for number in range(600):
        await placer.place(PROMPT, tenant_key=b"t" * 32, forecast=fixed(9), request_id=str(number))
    pairs = placer.explain("599")
    assert pairs is not None
    assert [(pair.prefill, pair.decode) for pair in pairs] == [("p0", "d0")]
    assert placer.explain("0") is None


async def test_the_gate_learns_what_its_expectations_are_worth() -> None:
    seer, half_full = foresight(), await route_at(10_000)
    for n in range(30):  # 1 s is expected, of 2 that are granted; they see 3
        try:
            seer.admit(request(request_id=str(n)), half_full, fixed(100))
        except Overloaded:
            break
        seer.began(request(request_id=str(n), received_at=now() - 3.0))
        seer.answered(request(request_id=str(n)), 100, decoded_s=2.0)
    assert 1.9 < seer.hindsight.ttft < 3.0
    assert seer.refused["ttft"] == 1
    seer.admit(request(), await route_at(0), fixed(100))
