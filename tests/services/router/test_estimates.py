from __future__ import annotations

import random

import pytest
from epdserve.services.policy.pools import floats
from epdserve.services.router.estimates import KV_BYTES_PER_TOKEN, Estimates
from epdserve.services.router.request import GenerateRequest
from epdserve.services.sampling import SamplingParams
from epdserve.services.types import (
    DecodeReceipt,
    Effort,
    FinishReason,
    KVHandle,
    PrefillResult,
    TailRef,
    WorkerInfo,
    WorkerRole,
    token_ids,
)
from support.fake_cluster import worker_info


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def request(*, effort: int = 75, tenant: bytes = b"t" * 32, max_tokens: int = 4096) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        tokens=token_ids(range(100)),
        tenant_key=tenant,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1),
        deadline_at=1e9,
        effort=Effort(effort),
    )


def result(*, computed: int = 1000, run_ms: float = 100.0, cached: int = 0) -> PrefillResult:
    handle = KVHandle("p0", "1", "lease", (), TailRef(0, 1, 4096, 0, True), computed + cached)
    return PrefillResult(handle, cached, 0, computed, 0.0, run_ms)


def trouble_s(estimates: Estimates, info: WorkerInfo) -> float:
    return float(estimates.troubles_s(estimates.rows([info.worker]), floats([info.step_age_s]))[0])


def test_a_fixed_length_is_counted_on_until_something_is_known() -> None:
    estimates = Estimates(blind_tokens=1024)
    assert estimates.forecast(request()).mean == 1024
    assert estimates.forecast(request(max_tokens=10)).mean == 10


def test_lengths_are_learnt_by_effort_and_never_exceed_what_is_allowed() -> None:
    estimates = Estimates()
    for _ in range(60):
        estimates.answered(request(effort=50), 100, FinishReason.STOP)
        estimates.answered(request(effort=100), 900, FinishReason.STOP)
    assert estimates.forecast(request(effort=50)).mean < 200
    assert estimates.forecast(request(effort=100)).mean > 600
    assert estimates.forecast(request(effort=100, max_tokens=64)).high == 64
    assert estimates.lengths.calibration.answers == 120


def test_speeds_are_those_measured_and_of_a_new_worker_those_of_the_others() -> None:
    estimates = Estimates()
    assert estimates.prefill_tokens_per_s("p0") == estimates.prefill_tokens_per_s("p1")
    for _ in range(50):
        estimates.prefilled("p0", result(computed=1000, run_ms=500.0), expected_hit_tokens=0)
    assert estimates.prefill_tokens_per_s("p0") == pytest.approx(2000)
    assert estimates.prefill_tokens_per_s("p1") == pytest.approx(2000)
    estimates.prefilled("p0", result(computed=3, run_ms=500.0), expected_hit_tokens=0)
    assert estimates.prefill_tokens_per_s("p0") == pytest.approx(2000)
    estimates.decoded("d0", DecodeReceipt("d0", steps=10, decode_ms=500.0))
    assert estimates.step_s("d1") == pytest.approx(0.05)


def test_what_was_not_where_the_index_said_is_counted() -> None:
    estimates = Estimates()
    estimates.prefilled("p0", result(cached=512), expected_hit_tokens=512)
    estimates.prefilled("p0", result(cached=100), expected_hit_tokens=512)
    hits = estimates.hits
    assert (hits.prefills, hits.misrouted) == (2, 1)
    assert (hits.expected_tokens, hits.missed_tokens) == (1024, 412)


def test_failures_are_avoided_for_a_while_and_then_forgiven() -> None:
    clock = Clock()
    estimates, info = Estimates(clock=clock), worker_info("p0", WorkerRole.PREFILL)
    assert trouble_s(estimates, info) == 0.0
    for _ in range(20):
        estimates.failed("p0")
    assert trouble_s(estimates, info) > 1.0
    clock.now = 120.0
    assert trouble_s(estimates, info) < 0.01


def test_a_hanging_step_is_seen_before_any_call_fails() -> None:
    assert trouble_s(Estimates(), worker_info("p0", WorkerRole.PREFILL, step_age_s=20.0)) > 10.0


def test_workers_that_are_gone_are_forgotten_once_they_are_many() -> None:
    estimates = Estimates()
    for number in range(100):
        estimates.failed(f"p{number}")
        estimates.keep(["p0"])
    assert estimates.workers <= 10


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2])
def test_what_a_request_adds_to_a_step_is_learnt_within_each_worker(share: float) -> None:
    estimates, draw = Estimates(), random.Random(1)
    assert estimates.request_share == pytest.approx(0.01)
    for _ in range(400):
        # One worker is twice as slow, and busier: that is no part of what a request costs
        worker, alone_s, most = draw.choice((("d0", 0.02, 8), ("d1", 0.04, 16)))
        running = draw.randrange(1, most)
        step_s = alone_s * (1 + share * running) * draw.uniform(0.95, 1.05)
        estimates.decoded(worker, DecodeReceipt(worker, steps=10, decode_ms=10_000 * step_s), running=running)
    alone_s, request_s = estimates.decode_steps_s(estimates.rows(["d0", "d1"]))
    assert alone_s[1] > 1.5 * alone_s[0]
    for at, (truth_s, usual) in enumerate(((0.02, 4.5), (0.04, 8.5))):
        step_s = truth_s * (1 + share * usual)
        assert alone_s[at] + usual * request_s[at] == pytest.approx(step_s, rel=0.3)
        assert request_s[at] == pytest.approx(share * truth_s, rel=0.5, abs=0.02 * truth_s)


def test_one_odd_step_teaches_little() -> None:
    estimates = Estimates()
    for running, ms in ((1, 100.0), (2, 1e6)):
        estimates.decoded("d0", DecodeReceipt("d0", steps=10, decode_ms=ms), running=running)
    assert estimates.request_share <= 0.3
    assert (estimates.decode_steps_s(estimates.rows(["d0", "d9"]))[0] > 0).all()


def test_hand_offs_are_learnt_by_whether_they_leave_the_machine() -> None:
    estimates = Estimates()
    before = estimates.handoffs.links
    estimates.handed_over(DecodeReceipt("d0", own_tokens=500, handoff_ms=9000.0), same_machine=False)
    estimates.handed_over(
        DecodeReceipt("d0", pulled_tokens=5, recomputed_tokens=5, handoff_ms=9000.0), same_machine=False
    )
    assert estimates.handoffs.links == before  # nothing was pulled, or it was not what took the time
    for _ in range(200):
        estimates.handed_over(DecodeReceipt("d0", pulled_tokens=10_000, handoff_ms=500.0), same_machine=False)
    links = estimates.handoffs.links
    assert links.same_machine_bytes_per_s == before.same_machine_bytes_per_s
    nbytes = 10_000 * KV_BYTES_PER_TOKEN + links.fixed_bytes
    assert links.other_latency_s + nbytes / links.other_machine_bytes_per_s == pytest.approx(0.5, rel=0.05)
