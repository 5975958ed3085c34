"""A step model fitted to real pools instead of a roofline: what the simulator is checked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from epdserve.loadtest.client import Outcome
from epdserve.loadtest.simulator.baselines import RoundRobin
from epdserve.loadtest.simulator.cluster import ClusterSpec
from epdserve.loadtest.simulator.hardware import Timing
from epdserve.loadtest.simulator.requests import INTERACTIVE, Request
from epdserve.loadtest.simulator.run import Simulation
from epdserve.loadtest.simulator.workers import Job, PrefillWorker
from epdserve.loadtest.simulator.workloads import Workload
from epdserve.services.policy.order import urgency

_CHUNK_TOKENS: Final = 256  # of a prefill worker's step, as ``engine.chunk_tokens`` has it
_PATIENT: Final = replace(INTERACTIVE, ttft_s=60.0, tpot_s=60.0)  # as the pools are told
_FACTORS: Final = np.arange(1.0, 3.01, 0.05)  # that steps may be longer by beside others


@dataclass(frozen=True, slots=True)
class FittedTiming(Timing):
    """Both steps as straight lines: over the prompts' tokens in it, and over the requests that decode together.

    What a request waits for beside steps (HTTP, router, hand-off) is ``link_latency_s``. Processes that share cores
    hold each other up, so both kinds of step are longer while the other kind of worker is at work.

    Attributes:
        prefill_beside, decode_beside: How many times as long they are then.
        chunk_tokens: Of all prompts in one step.
    """

    prefill_fixed_s: float = 0.0
    prefill_token_s: float = 0.001
    decode_fixed_s: float = 0.01
    decode_request_s: float = 0.001
    prefill_beside: float = 1.0
    decode_beside: float = 1.0
    chunk_tokens: int = _CHUNK_TOKENS
    same_machine_bytes_per_s: float = 1e15

    @property
    def prefill_tokens_per_s(self) -> float:
        """Beyond what every step takes."""
        return 1 / self.prefill_token_s

    def prefill_s(self, tokens: float, context: float) -> float:
        """Seconds of a step over so many tokens; contexts matter little at these lengths."""
        return self.prefill_fixed_s + tokens * self.prefill_token_s

    def decode_s(self, requests: float, held_tokens: float) -> float:
        """Seconds of a step."""
        return self.decode_fixed_s + requests * self.decode_request_s


@dataclass(frozen=True, slots=True)
class Seen:
    """A run's figures, simulated or measured."""

    ttft_p50_s: float
    ttft_mean_s: float
    tpot_p50_s: float
    tokens_per_s: float


def fit(outcomes: Sequence[Outcome]) -> FittedTiming:
    """Least squares over finished requests with receipts.

    Args:
        outcomes: Of one load or several; at least three that ended well, of different lengths.
    """
    good = [one for one in outcomes if one.ok and one.ttft_s is not None and one.itl_s is not None]
    prefills, decodes = (
        [_prefilling(one) for one in good],
        [(one.text_at[0], one.text_at[-1]) for one in good],
    )
    # A prompt that shares steps with others tells nothing of one alone
    alone = [at for at, span in enumerate(prefills) if sum(_meet(span, other) for other in prefills) == 1]
    tokens = [int(good[at].receipt["tokens"]["computed"]) for at in alone]
    prefill, prefill_beside = _crowded_line(
        [-(-count // _CHUNK_TOKENS) for count in tokens],
        tokens,
        [good[at].receipt["ms"]["prefill"] / 1000 for at in alone],
        [_covered(prefills[at], decodes) for at in alone],
    )
    decode, decode_beside = _crowded_line(
        [1] * len(good),
        [_beside(one, good) for one in good],
        [one.itl_s or 0.0 for one in good],
        [_covered(span, prefills) for span in decodes],
    )
    step_s = decode[0] + decode[1]
    waits = [
        (one.ttft_s or 0.0)
        - (one.receipt["ms"]["prefill_queue"] + one.receipt["ms"]["prefill"]) / 1000
        - step_s
        for one in good
    ]
    return FittedTiming(
        link_latency_s=max(0.0, float(np.median(waits))),
        prefill_fixed_s=prefill[0],
        prefill_token_s=max(1e-6, prefill[1]),
        decode_fixed_s=max(1e-6, decode[0]),
        decode_request_s=max(0.0, decode[1]),
        prefill_beside=prefill_beside,
        decode_beside=decode_beside,
    )


class _SharedCores(Simulation):
    """Workers that hold each other up: what a prefill takes is settled as it begins, decode steps at any time."""

    def _go_on(self, worker: PrefillWorker, now: float) -> None:
        timing, decodes = self._cluster.spec.timing, self._cluster.decodes
        assert isinstance(timing, FittedTiming)
        step = self._next_step(worker, timing, now)
        worker.running = step[0][0] if step else None
        if step:
            crowded = timing.prefill_beside if any(one.running for one in decodes) else 1.0
            tokens = sum(share for _, share in step)
            seconds = crowded * timing.prefill_s(tokens, tokens)
            self._at(now + seconds, lambda then: self._end_step(worker, step, then))
        busy = any(one.running is not None for one in self._cluster.prefills)
        slowness = timing.decode_beside if busy else 1.0
        for decode in decodes:
            if decode.slowness != slowness:
                decode.slow_down(slowness, now)
                self._expect_end(decode, now)

    def _next_step(self, worker: PrefillWorker, timing: FittedTiming, now: float) -> list[tuple[Job, float]]:
        """A chunk's tokens, given to the most urgent prompts first: as prefill workers do it."""
        for job in worker.jobs:
            if job.left_tokens < 0:
                self._cluster.start_prefill(job)

        def key(job: Job) -> tuple[float, int]:
            left_s = job.left_tokens * timing.prefill_token_s
            since = job.request.arrives_at
            score = urgency(arrived_at=since, target_s=_PATIENT.ttft_s, left_s=left_s, now=now)
            return score, job.request.number

        step: list[tuple[Job, float]] = []
        budget = float(timing.chunk_tokens)
        for job in sorted(worker.jobs, key=key):
            if share := min(job.left_tokens, budget):
                step.append((job, share))
                budget -= share
        return step

    def _end_step(self, worker: PrefillWorker, step: list[tuple[Job, float]], now: float) -> None:
        for job, share in step:
            job.left_tokens -= share
            if job.left_tokens < 0.5:
                worker.jobs.remove(job)
                arrives_at = now + self._cluster.transfer_s(job)
                self._at(arrives_at, lambda then, job=job: self._join(job, then))  # type: ignore[misc]
        self._go_on(worker, now)


def simulated(outcomes: Sequence[Outcome], timing: FittedTiming, *, prefills: int, decodes: int) -> Seen:
    """The same requests at the same times, on simulated pools."""
    good = sorted((one for one in outcomes if one.ok and one.itl_s is not None), key=lambda one: one.sent_at)
    began = good[0].sent_at
    requests = [_request(number, one, began) for number, one in enumerate(good)]
    spec = ClusterSpec(prefills, decodes, timing, routers=1)
    run = _SharedCores(spec, RoundRobin(), Workload(requests)).run()
    jobs = [job for job in run.jobs if job is not None]
    assert len(jobs) == len(requests), "round robin refuses nothing"
    return _seen(
        [job.first_token_at - job.request.arrives_at for job in jobs],
        [(job.finished_at - job.first_token_at) / (job.output_tokens - 1) for job in jobs],
        sum(job.output_tokens for job in jobs) / max(job.finished_at for job in jobs),
    )


def measured(outcomes: Sequence[Outcome]) -> Seen:
    """What clients saw."""
    good = [one for one in outcomes if one.ok and one.itl_s is not None]
    seconds = max(one.ended_at for one in good) - min(one.sent_at for one in good)
    return _seen(
        [one.ttft_s or 0.0 for one in good],
        [one.itl_s or 0.0 for one in good],
        sum(one.completion_tokens for one in good) / seconds,
    )


def _seen(ttft_s: Sequence[float], tpot_s: Sequence[float], tokens_per_s: float) -> Seen:
    return Seen(float(np.median(ttft_s)), float(np.mean(ttft_s)), float(np.median(tpot_s)), tokens_per_s)


def _request(number: int, outcome: Outcome, began: float) -> Request:
    return Request(
        number,
        outcome.sent_at - began,
        "t0",
        number,
        1,
        False,
        _PATIENT,
        75,
        75,
        outcome.prompt_tokens,
        (),
        (),
        outcome.completion_tokens,
    )


def _beside(outcome: Outcome, others: Sequence[Outcome]) -> float:
    """Requests that decoded together with one, itself included, on average over its time."""
    began, ended = outcome.text_at[0], outcome.text_at[-1]
    shared = (max(0.0, min(ended, o.text_at[-1]) - max(began, o.text_at[0])) for o in others)
    return float(sum(shared) / (ended - began))


def _prefilling(outcome: Outcome) -> tuple[float, float]:
    """When its prompt was computed, as nearly as the client can tell: it ends a hand-off and a step before the text."""
    took_s = outcome.receipt["ms"]["prefill"] / 1000
    began = outcome.sent_at + outcome.receipt["ms"]["prefill_queue"] / 1000
    return began, began + took_s


def _meet(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _covered(span: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Share of a span in which any of the others was going on."""
    began, ended = span
    covered, reached = 0.0, began
    for start, end in sorted(others):
        start, end = max(start, reached), min(end, ended)
        if end > start:
            covered += end - start
            reached = end
    return covered / (ended - began) if ended > began else 0.0


def _crowded_line(
    steps: Sequence[int], xs: Sequence[float], ys: Sequence[float], crowded: Sequence[float]
) -> tuple[tuple[float, float], float]:
    """Seconds a step and for each ``xs``, and the factor by which both are larger where ``crowded`` is 1."""
    best = (float("inf"), (0.0, 0.0), 1.0)
    for factor in _FACTORS:
        scale = 1 + (factor - 1) * np.asarray(crowded)
        columns = scale[:, None] * np.stack((steps, xs), axis=1)
        line = _positive(columns, np.asarray(ys))
        errors = np.asarray(ys) - columns @ line
        best = min(best, (float(errors @ errors), line, float(factor)))
    return best[1:]


def _positive(columns: npt.NDArray[np.float64], ys: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Least squares; neither is below nothing."""
    (first, second), *_ = np.linalg.lstsq(columns, ys, rcond=None)
    if second < 0:
        return float(columns[:, 0] @ ys / (columns[:, 0] @ columns[:, 0])), 0.0
    if first < 0:
        return 0.0, float(columns[:, 1] @ ys / (columns[:, 1] @ columns[:, 1]))
    return float(first), float(second)
