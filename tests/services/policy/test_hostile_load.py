"""What is sent to hurt: nothing crashes, nobody starves, memory stays bounded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from epdserve.loadtest.simulator.figures import met
from epdserve.loadtest.simulator.ours import Ours
from epdserve.loadtest.simulator.run import Run
from epdserve.loadtest.simulator.workloads import Workload
from epdserve.services.policy.fairness import FairnessSettings, ServiceMeter
from epdserve.services.policy.forecast import fixed
from epdserve.services.policy.joint import Placing, place
from epdserve.services.policy.length_model import LengthModel, LengthSettings, PromptClass
from epdserve.services.policy.pools import DecodePool, Links, PrefillPool, WorkerNames, floats
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated import simulated, workload


def served(run: Run, tenant: str) -> float:
    """Share of a tenant's requests that were served in time."""
    fates = [
        job is not None and met(job)
        for request, job in zip(run.requests, run.jobs, strict=True)
        if request.tenant == tenant
    ]
    return sum(fates) / len(fates)


def test_a_tenant_that_sends_eight_times_as_much_at_full_effort_starves_nobody() -> None:
    calm = workload(rate=6.0, seconds=15.0)
    flood = [
        replace(
            one,
            tenant="greedy",
            effort=100,
            floor=100,
            output_tokens=4 * one.output_tokens,
            blocks=tuple(block + copy * 10**6 for block in one.blocks),  # nothing of it is cached
            answer_blocks=(),
        )
        for one in calm.requests
        for copy in range(1, 9)
    ]
    merged = sorted([*calm.requests, *flood], key=lambda one: one.arrives_at)
    numbered = [replace(one, number=number) for number, one in enumerate(merged)]
    run = simulated(Ours(), requests=Workload(numbered, calm.warm))
    others = [served(run, tenant) for tenant in sorted({one.tenant for one in calm.requests})]
    assert served(run, "greedy") < 0.5
    assert np.mean(others) > served(run, "greedy")
    assert min(others) > 0.2


def test_prompts_of_one_token_and_of_a_million_end() -> None:
    calm = workload(rate=5.0, seconds=2.0).requests
    sizes = [replace(one, prompt_tokens=size, blocks=()) for one in calm for size in (1, 1_000_000)]
    requests = [replace(one, number=number) for number, one in enumerate(sizes)]
    run = simulated(Ours(), requests=Workload(requests))
    assert all(job is None or job.finished_at > 0 for job in run.jobs)
    assert all(job is not None for job in run.jobs if job and job.request.prompt_tokens == 1)


names = st.sets(st.integers(0, 40), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(names, names), min_size=1, max_size=8), st.sampled_from([1, 1_000_000]))
def test_workers_may_come_and_go_between_any_two_decisions(
    views: list[tuple[set[int], set[int]]], prompt_tokens: int
) -> None:
    for prefills, decodes in views:
        p_names, d_names = (WorkerNames(f"w{one:03}" for one in sorted(some)) for some in (prefills, decodes))
        some, more = len(p_names), len(d_names)
        none, ones = np.zeros(more), np.ones(more)
        pool = PrefillPool(
            p_names,
            np.arange(some),
            np.zeros(some),
            np.full(some, 1e4),
            np.zeros((3, some)),
            floats([1.0, 1e9, 1e9]),
            np.zeros(some),
        )
        beside = DecodePool(
            d_names,
            np.arange(more),
            none,
            none,
            none,
            1e6 * ones,
            0.02 * ones,
            1e-4 * ones,
            1e-9 * ones,
            none,
            none,
        )
        wanted = Placing("r", prompt_tokens, fixed(100), 2.0, 0.05, 890.0)
        chosen = place(pool, beside, Links(), wanted).chosen
        assert chosen.prefill in p_names
        assert chosen.decode in d_names
        assert chosen == place(pool, beside, Links(), wanted).chosen


def test_what_is_remembered_of_endless_tenants_is_bounded() -> None:
    model, meter = LengthModel(LengthSettings(max_cells=64)), ServiceMeter(FairnessSettings(limit=32))
    for number in range(2000):
        model.observe(PromptClass(number % 101, f"t{number}", number), 1 + number)
        meter.asked(f"t{number}", 1.0, now=float(number))
    assert model.cells <= 64
    assert len(meter) <= 32
