"""Workers that die under their requests: these go on elsewhere as the router's pipeline has them do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from epdserve.loadtest.simulator.baselines import BASELINES, LeastTokens, RoundRobin
from epdserve.loadtest.simulator.cluster import Fault
from epdserve.loadtest.simulator.figures import figures_of, met
from epdserve.loadtest.simulator.ours import Ours, Parts
from epdserve.loadtest.simulator.run import Policy, Run
from epdserve.loadtest.simulator.workers import Job
from support.simulated import SMALL, simulated, workload

POLICIES = [Ours, RoundRobin, LeastTokens]


def with_death(
    policy: Policy, role: str, *, at_s: float = 1.0, until_s: float = 100.0, lease_s: float = 0.5
) -> Run:
    spec = replace(SMALL, faults=(Fault(role, 0, at_s, until_s, dies=True),), lease_s=lease_s)
    return simulated(policy, spec=spec, requests=workload(rate=12.0, seconds=4.0))


def admitted(run: Run) -> list[Job]:
    return [job for job in run.jobs if job is not None]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decode_worker_that_dies_costs_a_pause_and_no_token(policy: Callable[[], Policy]) -> None:
    run = with_death(policy(), "decode")
    resumed = [job for job in admitted(run) if job.resumes]
    assert resumed
    for job in resumed:
        # What was delivered before the death counts as prompt, what comes after it is the rest
        assert 0 < job.done_tokens < job.output_tokens == job.request.output_at(job.effort)
        assert (job.decode, job.failed) == (1, False)
        assert job.first_token_at < 1.0 < job.finished_at
    assert not any(job.failed for job in admitted(run))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prefill_worker_that_dies_costs_one_retry(policy: Callable[[], Policy]) -> None:
    run = with_death(policy(), "prefill")
    retried = [job for job in admitted(run) if job.retries]
    assert retried
    assert all((job.prefill, job.failed, job.done_tokens) == (1, False, 0) for job in retried)
    assert all(job.first_token_at > job.request.arrives_at for job in admitted(run))
    # Once its lease is over nobody is sent there
    assert {job.prefill for job in admitted(run) if job.request.arrives_at > 1.8} == {1}


def test_a_second_death_before_the_first_token_is_told_to_the_client() -> None:
    faults = tuple(Fault("prefill", worker, 1.0, 100.0, dies=True) for worker in (0, 1))
    run = simulated(
        RoundRobin(), spec=replace(SMALL, faults=faults), requests=workload(rate=12.0, seconds=2.0)
    )
    late = [job for job in admitted(run) if job.request.arrives_at > 1.0]
    assert late
    assert all(job.failed and job.retries == 2 and not met(job) for job in late)
    figures = figures_of(run, skip_ratio=0.0)
    assert 0 < figures.met_ratio < 1
    assert 0 <= figures.ttft_p99_s < 100


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_comes_back_is_used_again_with_nothing_in_its_pages(role: str) -> None:
    run = with_death(Ours(parts=Parts(gate=False)), role, until_s=2.0)
    assert any(getattr(job, role) == 0 for job in admitted(run) if job.request.arrives_at > 2.3)
    assert not any(job.failed for job in admitted(run))


def test_ours_avoids_a_dead_worker_before_its_lease_is_over() -> None:
    def sent_to_the_dead(policy: Policy) -> int:
        run = with_death(policy, "prefill", lease_s=3.0)
        return sum(job.retries for job in admitted(run) if job.request.arrives_at > 1.0)

    assert sent_to_the_dead(Ours(parts=Parts(gate=False))) < 0.7 * sent_to_the_dead(RoundRobin())


@pytest.mark.parametrize("kind", BASELINES, ids=lambda kind: kind.name)
def test_nothing_is_lost_whatever_the_policy(kind: Callable[[], Policy]) -> None:
    run = with_death(kind(), "decode", until_s=1.5)
    assert all(job.finished_at > 0 and not job.failed for job in admitted(run))


def test_the_same_deaths_give_the_same_bytes() -> None:
    def told() -> list[tuple[float, ...]]:
        return [(job.prefill, job.decode, job.finished_at) for job in admitted(with_death(Ours(), "decode"))]

    assert told() == told()
