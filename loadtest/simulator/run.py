"""The event loop of a simulation: arrivals, chunks, hand-offs, ends, heartbeats and faults in order of virtual time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

from epdserve.loadtest.simulator.cluster import Cluster, ClusterSpec, Fault
from epdserve.loadtest.simulator.hardware import Timing
from epdserve.loadtest.simulator.requests import Request
from epdserve.loadtest.simulator.view import View
from epdserve.loadtest.simulator.workers import DecodeWorker, Job, PrefillWorker
from epdserve.loadtest.simulator.workloads import Workload

# As the router's pipeline has them: a retry before the first token, and so many resumes after it
_RETRIES: Final = 1
_RESUMES: Final = 3


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a request goes.

    Attributes:
        effort: Granted.
        hit_tokens: Expected hit.
        expected_tokens: Output counted on.
    """

    prefill: int
    decode: int
    effort: int
    hit_tokens: float
    expected_tokens: float


class Policy(Protocol):
    """What drives a simulated router. One object serves all routers of a run; a view is one router's knowledge."""

    name: ClassVar[str]

    @property
    def urgent(self) -> bool:
        """Whether workers take the most urgent prompt next, or the first."""

    def route(self, request: Request, view: View, now: float) -> Routed | None:
        """A place, or None for a 429."""

    def again(self, job: Job, view: View, now: float) -> Routed:
        """Another place for a request that lost a worker; it is not refused."""

    def began(self, job: Job, now: float) -> None:
        """A request's first token has come."""

    def finished(self, job: Job, now: float) -> None:
        """A request has ended."""


@dataclass(frozen=True, slots=True)
class Run:
    """What happened: every request's job, None if it was refused; jobs of which workers died may have failed."""

    requests: Sequence[Request]
    jobs: Sequence[Job | None]
    tier_tokens: dict[str, float]
    prompt_tokens: float
    ended_at: float
    timing: Timing


class Simulation:
    """One run of one policy on one workload."""

    def __init__(self, spec: ClusterSpec, policy: Policy, workload: Workload) -> None:
        self._cluster = Cluster(spec, urgent=policy.urgent)
        requests = workload.requests
        for index, chain in enumerate(workload.warm):
            self._cluster.caches.store(index % spec.machine_count, chain)
        self._policy = policy
        self._requests = requests
        self._jobs: list[Job | None] = [None] * len(requests)
        self._views = [View(self._cluster) for _ in range(spec.routers)]
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._live = 0

    def run(self) -> Run:
        """Until the last request has ended."""
        spec = self._cluster.spec
        for index, request in enumerate(self._requests):
            self._at(request.arrives_at, lambda now, index=index: self._arrive(index, now))  # type: ignore[misc]
        for fault in spec.faults:
            self._at(fault.at_s, lambda now, fault=fault: self._begin_fault(fault, now))  # type: ignore[misc]
            self._at(fault.until_s, lambda _, fault=fault: self._end_fault(fault))  # type: ignore[misc]
        self._left = len(self._requests)
        self._at(0.0, self._heartbeat)
        now = 0.0
        while self._heap:
            now, _, event = heapq.heappop(self._heap)
            event(now)
        cluster = self._cluster
        return Run(self._requests, self._jobs, cluster.tier_tokens, cluster.prompt_tokens, now, spec.timing)

    def _at(self, at: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, event))

    def _heartbeat(self, now: float) -> None:
        for view in self._views:
            view.refresh(now)
        if self._left or self._live:
            self._at(now + self._cluster.spec.heartbeat_s, self._heartbeat)

    def _arrive(self, index: int, now: float) -> None:
        self._left -= 1
        request = self._requests[index]
        view = self._views[index % len(self._views)]
        routed = self._policy.route(request, view, now)
        if routed is None:
            return
        job = Job(
            request,
            routed.effort,
            request.output_at(routed.effort),
            routed.expected_tokens,
            routed.prefill,
            routed.decode,
            now,
            hit_tokens=routed.hit_tokens,
            router=index % len(self._views),
        )
        self._jobs[index] = job
        self._live += 1
        self._send(job, view, now)

    def _send(self, job: Job, view: View, now: float) -> None:
        """On its way to the two workers that were chosen."""
        view.sent(
            job.prefill,
            job.decode,
            compute_tokens=max(1.0, job.prompt_tokens - job.hit_tokens),
            prompt_tokens=job.prompt_tokens,
            expected=job.expected_tokens,
        )
        worker = self._cluster.prefills[job.prefill]
        job.lives = worker.life, self._cluster.decodes[job.decode].life
        if worker.died_at is not None:
            latency_s = self._cluster.spec.timing.link_latency_s
            self._at(now + latency_s, lambda then: self._lose(job, ("prefill", job.prefill), then))
            return
        worker.jobs.append(job)
        if worker.running is None:
            self._go_on(worker, now)

    def _begin_fault(self, fault: Fault, now: float) -> None:
        self._cluster.set_fault(fault, on=True)
        if fault.dies:
            for job in self._cluster.fell(fault, now):
                self._lose(job, (fault.role, fault.worker), now)

    def _end_fault(self, fault: Fault) -> None:
        self._cluster.set_fault(fault, on=False)
        if fault.dies:
            self._cluster.rose(fault)

    def _lose(self, job: Job, worker: tuple[str, int], now: float) -> None:
        """A worker died under a request: it goes on elsewhere, unless that has happened too often."""
        view = self._views[job.router]
        view.failed(*worker)
        job.lost.add(worker)
        if job.done_tokens:
            job.resumes += 1
        else:
            job.first_token_at = 0.0
            job.retries += 1
        if job.retries > _RETRIES or job.resumes > _RESUMES:
            job.failed, job.finished_at = True, now
            self._live -= 1
            return
        with view.without(job.lost):
            routed = self._policy.again(job, view, now)
        job.prefill, job.decode, job.hit_tokens = routed.prefill, routed.decode, routed.hit_tokens
        job.left_tokens, job.fetch_s = -1.0, 0.0
        self._send(job, view, now)

    def _go_on(self, worker: PrefillWorker, now: float) -> None:
        job = worker.pick(now)
        if job is None:
            return
        if job.left_tokens < 0:
            self._cluster.start_prefill(job)
        life = worker.life
        self._at(now + worker.begin_chunk(), lambda then: self._end_chunk(worker, life, then))

    def _end_chunk(self, worker: PrefillWorker, life: int, now: float) -> None:
        if worker.life != life:
            return
        job = worker.running
        assert job is not None
        if worker.end_chunk():
            self._cluster.caches.fill(worker.index, job.request.blocks)
            self._at(now + self._cluster.transfer_s(job), lambda then: self._join(job, then))
        self._go_on(worker, now)

    def _join(self, job: Job, now: float) -> None:
        decode = self._cluster.decodes[job.decode]
        if self._cluster.prefills[job.prefill].life != job.lives[0]:
            self._lose(job, ("prefill", job.prefill), now)
            return
        if decode.died_at is not None or decode.life != job.lives[1]:
            self._lose(job, ("decode", job.decode), now)
            return
        decode.join(job, now)
        self._expect_first_tokens(decode)
        self._expect_end(decode, now)

    def _expect_first_tokens(self, decode: DecodeWorker) -> None:
        for job in decode.started:
            self._at(job.first_token_at, lambda then, job=job: self._began(job, then))  # type: ignore[misc]
        decode.started.clear()

    def _began(self, job: Job, now: float) -> None:
        # Its worker may have died a step before
        if job.first_token_at == now:
            self._policy.began(job, now)

    def _expect_end(self, decode: DecodeWorker, now: float) -> None:
        wait_s = decode.next_end_s()
        if wait_s is not None:
            version = decode.version
            self._at(now + wait_s, lambda then: self._end(decode, version, then))

    def _end(self, decode: DecodeWorker, version: int, now: float) -> None:
        if version != decode.version:
            return
        for job in decode.end_due(now):
            self._live -= 1
            if job.request.answer_blocks and job.effort == job.request.effort:
                self._cluster.caches.store(
                    self._cluster.decode_machines[job.decode], job.request.answer_blocks
                )
            self._policy.finished(job, now)
        self._expect_first_tokens(decode)
        self._expect_end(decode, now)
