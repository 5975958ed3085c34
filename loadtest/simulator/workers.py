"""Simulated workers: a prefill worker computes chunk by chunk, a decode worker steps for all its requests at once."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from epdserve.loadtest.simulator.hardware import Timing
from epdserve.loadtest.simulator.requests import Request
from epdserve.services.policy.order import urgency

CHUNK_TOKENS = 8192


@dataclass(slots=True, eq=False)
class Job:
    """One request on its way.

    Attributes:
        expected_tokens: Output that the policy counts on.
        left_tokens: Prompt tokens still to compute; -1 = not started.
        router: Which one has it.
        lives: Of its workers when it was sent to them.
        done_tokens: Output that came from workers that died since; it is part of the prompt now.
        lost: Workers that died under it, by role and number: it is not sent there again.
        failed: Given up.
    """

    request: Request
    effort: int
    output_tokens: int
    expected_tokens: float
    prefill: int
    decode: int
    routed_at: float
    left_tokens: float = -1.0
    fetch_s: float = 0.0
    hit_tokens: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    router: int = 0
    lives: tuple[int, int] = (0, 0)
    done_tokens: int = 0
    retries: int = 0
    resumes: int = 0
    lost: set[tuple[str, int]] = field(default_factory=set)
    failed: bool = False

    @property
    def prompt_tokens(self) -> int:
        """What is to be prefilled: the prompt, and what has been delivered."""
        return self.request.prompt_tokens + self.done_tokens


class PrefillWorker:
    """A queue and one running chunk.

    Attributes:
        slowness: All times are multiplied by this; 1 = healthy.
        draining: Ends what it has and is given nothing new, once the routers know.
        queued_tokens: Of jobs that have not been finished, as far as known.
    """

    def __init__(self, index: int, timing: Timing, *, urgent: bool) -> None:
        self.index = index
        self.slowness = 1.0
        self.draining = False
        self.life = 0
        self.died_at: float | None = None
        self.jobs: list[Job] = []
        self.running: Job | None = None
        self._chunk = 0.0
        self._timing = timing
        self._urgent = urgent
        self.busy_s = 0.0

    def pick(self, now: float) -> Job | None:
        """The job to go on with, None if there is none: in order of arrival, or the most urgent."""
        if not self.jobs:
            self.running = None
        elif not self._urgent or len(self.jobs) == 1:
            self.running = self.jobs[0]
        else:
            speed = self._timing.prefill_tokens_per_s

            def key(job: Job) -> tuple[float, int]:
                left = job.left_tokens if job.left_tokens >= 0 else job.prompt_tokens - job.hit_tokens
                request = job.request
                score = urgency(
                    arrived_at=request.arrives_at,
                    target_s=request.targets.ttft_s,
                    left_s=left / speed,
                    now=now,
                )
                return score, request.number

            self.running = min(self.jobs, key=key)
        return self.running

    def lose(self, now: float) -> list[Job]:
        """All it had, as it dies."""
        lost, self.jobs, self.running = self.jobs, [], None
        return lost

    def begin_chunk(self) -> float:
        """Seconds that the next chunk of the running job takes."""
        job = self.running
        assert job is not None
        self._chunk = min(job.left_tokens, CHUNK_TOKENS) if self._urgent else job.left_tokens
        context = job.prompt_tokens - (job.left_tokens - self._chunk)
        seconds = (self._timing.prefill_s(self._chunk, context) + job.fetch_s) * self.slowness
        job.fetch_s = 0.0
        self.busy_s += seconds
        return seconds

    def end_chunk(self) -> bool:
        """Whether the running job is done with it."""
        job = self.running
        assert job is not None
        job.left_tokens -= self._chunk
        if job.left_tokens > 0.5:
            return False
        self.jobs.remove(job)
        return True


class DecodeWorker:
    """All requests advance together, a token a step. Between two changes the step's time is taken as constant.

    Attributes:
        steps: Steps done so far, with fractions: a request that joined at s with n tokens ends at s + n.
        version: Goes up with each change; an end announced before it is void.
        started: Whose first token has been scheduled; whoever has seen them clears it.
    """

    def __init__(self, index: int, timing: Timing, *, total_tokens: int) -> None:
        self.index = index
        self.total_tokens = total_tokens
        self.slowness = 1.0
        self.draining = False
        self.life = 0
        self.died_at: float | None = None
        self.steps = 0.0
        self.version = 0
        self.running = 0
        self.held_tokens = 0.0
        self.expected_tokens = 0.0
        self.waiting: deque[Job] = deque()
        self.started: list[Job] = []
        self._prompt_tokens = 0.0
        self._timing = timing
        self._since = 0.0
        self._step_s = timing.decode_s(0, 0)
        self._ends: list[tuple[float, int, Job]] = []

    @property
    def step_s(self) -> float:
        """Time of a step now."""
        return self._step_s

    @property
    def remaining_tokens(self) -> float:
        """Output still to come, as the policy that sent the requests expects it, together."""
        done = self.held_tokens - self._prompt_tokens
        return max(0.3 * self.expected_tokens, self.expected_tokens - done)

    def advance(self, now: float) -> None:
        """Step until ``now``."""
        gone = (now - self._since) / self._step_s
        self.steps += gone
        self.held_tokens += gone * self.running
        self._since = now

    def join(self, job: Job, now: float) -> None:
        """A request whose KV has come; it waits if the pages do not suffice."""
        self.advance(now)
        if self.running and self.held_tokens + job.prompt_tokens > self.total_tokens:
            self.waiting.append(job)
            return
        self._start(job, now)

    def end_due(self, now: float) -> list[Job]:
        """Requests that have made all their tokens."""
        self.advance(now)
        done = []
        while self._ends and self._ends[0][0] <= self.steps + 1e-6:
            _, _, job = heapq.heappop(self._ends)
            job.finished_at = now
            self.running -= 1
            self.held_tokens -= job.request.prompt_tokens + job.output_tokens
            self._prompt_tokens -= job.prompt_tokens
            self.expected_tokens -= job.expected_tokens
            done.append(job)
        while self.waiting and (
            not self.running or self.held_tokens + self.waiting[0].prompt_tokens <= self.total_tokens
        ):
            self._start(self.waiting.popleft(), now)
        self._retime()
        return done

    def lose(self, now: float) -> list[Job]:
        """All it had, as it dies; what each had made has been delivered."""
        self.advance(now)
        lost = list(self.waiting)
        for end, _, job in sorted(self._ends):
            made = job.output_tokens - math.ceil(end - self.steps - 1e-6)
            job.done_tokens = min(job.output_tokens - 1, max(job.done_tokens, made))
            lost.append(job)
        self.waiting.clear()
        self.started.clear()
        self._ends.clear()
        self.running = 0
        self.held_tokens = self.expected_tokens = self._prompt_tokens = 0.0
        self._retime()
        return lost

    def slow_down(self, slowness: float, now: float) -> None:
        """All steps from now on take so many times as long as a healthy worker's."""
        self.advance(now)
        self.slowness = slowness
        self._retime()

    def next_end_s(self) -> float | None:
        """Seconds until the next request ends, None if none runs."""
        if not self._ends:
            return None
        return max(0.0, (self._ends[0][0] - self.steps) * self._step_s)

    def _start(self, job: Job, now: float) -> None:
        self.running += 1
        self.held_tokens += job.prompt_tokens
        self._prompt_tokens += job.prompt_tokens
        self.expected_tokens += job.expected_tokens
        self._retime()
        if not job.done_tokens:
            job.first_token_at = now + self._step_s
            self.started.append(job)
        left = job.output_tokens - job.done_tokens
        heapq.heappush(self._ends, (self.steps + left, job.request.number, job))

    def _retime(self) -> None:
        self.version += 1
        self._step_s = self._timing.decode_s(self.running, max(0.0, self.held_tokens)) * self.slowness
