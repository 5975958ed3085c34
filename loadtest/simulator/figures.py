"""From a run to figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epdserve.loadtest.simulator.hardware import Timing
from epdserve.loadtest.simulator.requests import Request
from epdserve.loadtest.simulator.run import Run
from epdserve.loadtest.simulator.workers import Job
from epdserve.services.policy.fairness import jain_index, max_min_shares


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, without its first and last part.

    Attributes:
        goodput: Requests a second that met both targets.
        met_ratio: Of the requests that were admitted.
        refused_ratio: Of all.
        ttft_p50_s, ttft_p99_s, tpot_p50_s, tpot_p99_s: Of admitted ones.
        hit_ratio: Prompt tokens that were not computed, by tier.
        fairness: Jain's index of what tenants got over their max-min shares of it, in seconds of workers:
            prefill computed, and their part of decode steps.
        token_fairness: The same in tokens of prompts and answers, cached ones included.
        granted_effort: Mean.
    """

    goodput: float
    met_ratio: float
    refused_ratio: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    hit_ratio: dict[str, float]
    fairness: float
    token_fairness: float
    granted_effort: float
    output_tokens_per_s: float


def met(job: Job) -> bool:
    """Whether both targets were met."""
    targets = job.request.targets
    return not job.failed and ttft_s(job) <= targets.ttft_s and tpot_s(job) <= targets.tpot_s


def ttft_s(job: Job) -> float:
    """Arrival to first token."""
    return job.first_token_at - job.request.arrives_at


def tpot_s(job: Job) -> float:
    """Mean time per token after the first."""
    return (
        (job.finished_at - job.first_token_at) / max(1, job.output_tokens - 1)
        if job.output_tokens > 1
        else 0.0
    )


def figures_of(run: Run, *, skip_ratio: float = 0.35) -> Figures:
    """Figures of what arrived after the first ``skip_ratio`` of the time."""
    last_s = run.requests[-1].arrives_at
    from_s = skip_ratio * last_s
    jobs = [
        (request, job)
        for request, job in zip(run.requests, run.jobs, strict=True)
        if request.arrives_at >= from_s
    ]
    inside = [job for _, job in jobs if job is not None]
    ended = [job for job in inside if not job.failed]
    good = [job for job in ended if met(job)]
    span_s = max(1e-9, last_s - from_s)
    return Figures(
        len(good) / span_s,
        len(good) / max(1, len(inside)),
        1 - len(inside) / max(1, len(jobs)),
        *_two([ttft_s(job) for job in ended]),
        *_two([tpot_s(job) for job in ended if job.output_tokens > 1]),
        {tier: tokens / max(1.0, run.prompt_tokens) for tier, tokens in run.tier_tokens.items()},
        *_fairness([request for request, _ in jobs], good, run.timing),
        statistics.fmean([job.effort for job in inside]) if inside else 0.0,
        sum(job.output_tokens for job in good) / span_s,
    )


def _fairness(asked: Sequence[Request], good: Sequence[Job], timing: Timing) -> tuple[float, float]:
    """Jain's index of what tenants got over what max-min shares of it would have given them: by work, by tokens.

    What a refused request would have cost is not known: tokens of a tenant are taken to cost what its served ones did.
    """
    wished: dict[str, float] = {}
    for request in asked:
        wished[request.tenant] = (
            wished.get(request.tenant, 0.0) + request.prompt_tokens + request.output_tokens
        )
    tokens, work_s = dict.fromkeys(wished, 0.0), dict.fromkeys(wished, 0.0)
    slot_s = timing.slot_s
    for job in good:
        request = job.request
        tokens[request.tenant] += request.prompt_tokens + job.output_tokens
        computed = request.prompt_tokens - job.hit_tokens
        work_s[request.tenant] += computed / timing.prefill_tokens_per_s + job.output_tokens * slot_s
    rate = {name: work_s[name] / tokens[name] if tokens[name] else 0.0 for name in wished}
    usual = sum(work_s.values()) / max(1.0, sum(tokens.values()))
    demand_s = {name: (rate[name] or usual) * count for name, count in wished.items()}
    return _jain(demand_s, work_s), _jain(wished, tokens)


def _jain(demands: Mapping[str, float], served: Mapping[str, float]) -> float:
    shares = max_min_shares(demands, sum(served.values()))
    return jain_index([served[name] / shares[name] for name in sorted(demands) if shares[name] > 0])


def _two(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    if not ordered:
        return 0.0, 0.0
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
