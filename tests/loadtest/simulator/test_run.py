from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from epdserve.loadtest.simulator.baselines import BASELINES, Baseline, LeastTokens, RoundRobin
from epdserve.loadtest.simulator.cluster import Fault
from epdserve.loadtest.simulator.figures import figures_of, met, tpot_s, ttft_s
from epdserve.loadtest.simulator.ours import Ours, Parts
from epdserve.loadtest.simulator.run import Policy, Run
from support.simulated import SMALL, simulated, workload


def bytes_of(run: Run) -> str:
    return repr(
        [
            None
            if job is None
            else (job.prefill, job.decode, job.effort, job.first_token_at, job.finished_at)
            for job in run.jobs
        ]
    )


def test_the_same_seed_gives_the_same_bytes() -> None:
    once = bytes_of(simulated(Ours()))
    assert bytes_of(simulated(Ours())) == once
    assert bytes_of(simulated(Ours(), requests=workload(seed=2))) != once


@pytest.mark.parametrize("kind", BASELINES, ids=lambda kind: kind.name)
def test_every_admitted_request_ends_after_it_began(kind: type[Baseline]) -> None:
    run = simulated(kind())
    jobs = [job for job in run.jobs if job is not None]
    assert len(jobs) == len(run.requests) > 30
    assert all(job.request.arrives_at < job.first_token_at <= job.finished_at for job in jobs)


def test_a_bound_on_the_queue_refuses() -> None:
    assert figures_of(simulated(LeastTokens({"cap_s": 0.05}))).refused_ratio > 0.05


def test_an_idle_cluster_serves_everybody_in_time_whatever_the_policy() -> None:
    calm = workload(rate=4.0, seconds=10.0)
    for policy in (Ours(), RoundRobin()):
        run = simulated(policy, requests=calm)
        late = [job for job in run.jobs if job is not None and not met(job)]
        # A prompt of 130,000 tokens cannot be in time
        assert all(job.request.prompt_tokens > 100_000 for job in late)


def test_tokens_are_conserved_between_tiers_and_prompts() -> None:
    run = simulated(Ours(parts=Parts(gate=False)))
    assert run.prompt_tokens == sum(request.prompt_tokens for request in run.requests)
    assert 0 < sum(run.tier_tokens.values()) < run.prompt_tokens


def test_ours_refuses_when_it_must_and_serves_more_in_time() -> None:
    crowd = workload(rate=45.0, seconds=4.0)
    ours, theirs = (figures_of(simulated(policy, requests=crowd)) for policy in (Ours(), LeastTokens()))
    assert ours.goodput > theirs.goodput
    assert ours.met_ratio > 0.9
    assert ours.refused_ratio > 0


def test_a_slow_worker_is_avoided() -> None:
    slow = replace(SMALL, faults=(Fault("prefill", 0, 0.1, 100.0, 6.0),))
    run = simulated(Ours(parts=Parts(gate=False)), spec=slow, requests=workload(rate=12.0))
    shares = [
        sum(job.request.prompt_tokens - job.hit_tokens for job in run.jobs if job and job.prefill == w)
        for w in (0, 1)
    ]
    assert shares[0] < shares[1] / 2


@pytest.mark.parametrize("policy", [Ours, RoundRobin, LeastTokens])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_draining_worker_ends_what_it_has_and_is_given_nothing(
    policy: Callable[[], Policy], role: str
) -> None:
    spec = replace(SMALL, faults=(Fault(role, 0, 1.0, 2.0, drains=True),))
    run = simulated(policy(), spec=spec, requests=workload(rate=12.0, seconds=4.0))
    jobs = [job for job in run.jobs if job is not None]
    # A heartbeat later the routers know
    inside = [getattr(job, role) for job in jobs if 1.3 < job.request.arrives_at < 2.0]
    assert inside
    assert 0 not in inside
    assert 0 in [getattr(job, role) for job in jobs if job.request.arrives_at > 2.3]
    assert all(job.finished_at > 0 for job in jobs)


def test_pages_that_do_not_suffice_make_requests_wait_and_lose_none() -> None:
    tight = replace(SMALL, decode_tokens=60_000)
    run = simulated(RoundRobin(), spec=tight, requests=workload(rate=10.0))
    assert all(job is not None and job.finished_at > 0 for job in run.jobs)


def test_figures_are_those_of_the_jobs() -> None:
    run = simulated(RoundRobin())
    figures = figures_of(run, skip_ratio=0.0)
    jobs = [job for job in run.jobs if job is not None]
    assert figures.goodput == pytest.approx(sum(map(met, jobs)) / run.requests[-1].arrives_at)
    assert figures.ttft_p99_s <= max(map(ttft_s, jobs))
    assert figures.tpot_p50_s <= max(map(tpot_s, jobs))
    assert 0 < figures.fairness <= 1
