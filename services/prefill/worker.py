"""The prefill step loop's work: prompts in, KV under a lease out.

A prompt waits for a state slot, a staging slot and all of its pages at once, so that no two half-done prompts wait for
each other. Then its rows run in chunks beside those of other prompts; blocks are sealed, and so can be hit, as they
fill. At the end pages and tail are put under a lease, and the state slot is free.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import LeaseId, PageId
from epdserve.model.batch import Outputs
from epdserve.model.replay import PrefillSpan
from epdserve.services.engine.chunks import share_budget
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Part, Runner
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.errors import Cancelled, Overloaded, ServiceError
from epdserve.services.prefill.promise import Promise
from epdserve.services.prefill.scoring import PromptScorer
from epdserve.services.types import BlockRef, KVHandle, PrefillJob, PrefillResult, TailRef

_NOT_STARTED = PrefillSpan(first_row=0, publish_from=0, encoder_floor=0, decoder_from=0, decoder_floor=0)


@dataclass(slots=True, eq=False)
class PrefillTask:
    """One prompt on its way through the worker."""

    request: RunningRequest
    queued_at: float
    readers: int = 1
    scorer: PromptScorer | None = None
    done: Future[PrefillResult] = field(default_factory=Future)
    started_at: float = 0.0
    staging: Slot | None = None


class PrefillWorker:
    """Prompts of one worker. Owned by the step loop, not thread-safe; ``new_task`` may be called anywhere.

    Args:
        worker: Name in handles.
        incarnation: This life of the worker.
        lease_ttl_s: How long a handle is good for.
    """

    def __init__(
        self,
        runner: Runner,
        settings: EngineSettings,
        leases: LeaseTable,
        *,
        worker: str,
        incarnation: str,
        lease_ttl_s: float,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._runner, self._settings, self._leases = runner, settings, leases
        self._worker, self._incarnation, self._lease_ttl_s = worker, incarnation, lease_ttl_s
        self._metrics = metrics or EngineMetrics.unregistered()
        self._limits = RequestLimits.of(runner, settings)
        self._waiting: deque[PrefillTask] = deque()
        self._active: list[PrefillTask] = []
        self._granted: dict[str, tuple[LeaseId, ...]] = {}  # by request, while one of them holds
        self.queued_tokens = 0  # read by heartbeats from another thread

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt that is taken."""
        return self._limits.max_context_tokens

    @property
    def waiting(self) -> int:
        """Prompts without a place yet."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Prompts that are being run."""
        return len(self._active)

    @property
    def idle(self) -> bool:
        """Whether no prompt is here; leases may still be open."""
        return not self._waiting and not self._active

    def oldest_waiting_s(self) -> float:
        """How long the first prompt in the queue has waited."""
        try:
            return self._runner.clock.monotonic() - self._waiting[0].queued_at
        except IndexError:  # a metrics scrape may look while the loop takes the last one
            return 0.0

    def leases_of(self, request_id: str) -> tuple[LeaseId, ...]:
        """The leases that a request's answer carries, while one of them holds; may be called anywhere."""
        return self._granted.get(request_id, ())

    def new_task(self, job: PrefillJob) -> PrefillTask:
        """Check a job and make a task of it.

        Raises:
            InvalidRequest: Empty, too long, a token id outside the vocabulary, or an unusable tenant key.
        """
        tokens = np.asarray(job.tokens, dtype=np.int64)
        self._limits.check(tokens, job.tenant_key, max_new_tokens=0)
        request = RunningRequest(
            request_id=job.request_id,
            tokens=tokens,
            length=len(tokens),
            prompt_tokens=len(tokens),
            tenant_key=job.tenant_key,
            exact=job.exact,
            span=_NOT_STARTED,
            every_row=job.prompt_logprobs is not None,
        )
        scorer = None
        if job.prompt_logprobs is not None:
            scorer = PromptScorer(self._runner.backbone, job.tokens, job.prompt_logprobs)
        return PrefillTask(request, self._runner.clock.monotonic(), job.readers, scorer)

    def enqueue(self, task: PrefillTask) -> None:
        """Take a task into the queue, or refuse it through its future."""
        if len(self._waiting) >= self._settings.max_queued:
            message = f"{len(self._waiting)} prompts wait for this worker"
            self._end(task, Overloaded(message, worker=self._worker, retry_after_s=1.0))
            return
        self._waiting.append(task)
        self._count_queued()

    def cancel(self, task: PrefillTask) -> None:
        """Drop a task wherever it is and free what it holds; nothing happens if it has ended."""
        if task in self._waiting:
            self._waiting.remove(task)
        elif task in self._active:
            self._active.remove(task)
        else:
            return
        self._end(task, Cancelled(f"prefill of {task.request.request_id} was cancelled"))
        self._count_queued()

    def fail_all(self, error: ServiceError) -> None:
        """End every task with ``error``."""
        for task in [*self._waiting, *self._active]:
            self._end(task, error)
        self._waiting.clear()
        self._active.clear()
        self._count_queued()

    def abandon_all(self, error: ServiceError) -> None:
        """Tell every caller, free nothing: for a loop that crashed, whose books may be wrong."""
        for task in [*self._waiting, *self._active]:
            _tell(task, error)

    def step(self) -> bool:
        """Run one chunk of every prompt that has a place; whether there was anything to do."""
        self._leases.expire()
        self._start_waiting()
        if not self._active:
            return False
        began = self._runner.clock.monotonic()
        shares = share_budget(
            [task.request.remaining_rows for task in self._active], budget=self._settings.chunk_tokens
        )
        working = [(task, rows) for task, rows in zip(self._active, shares, strict=True) if rows]
        parts = [_part(task, rows) for task, rows in working]
        exits = self._runner.run(parts).split([_outputs(part) for part in parts])
        for (task, rows), exit_RD in zip(working, exits, strict=True):
            if task.scorer is not None:
                task.scorer.take(task.request.next_row - rows, exit_RD)
            if not task.request.remaining_rows:
                self._active.remove(task)
                self._hand_over(task, exit_RD[-1])
        self._count_queued()
        self._metrics.rows.labels(kind="prefill").inc(sum(shares))
        self._metrics.step_seconds.observe(self._runner.clock.monotonic() - began)
        return True

    def _start_waiting(self) -> None:
        while self._waiting:
            task = self._waiting[0]
            task.staging = self._runner.staging_slots.acquire()
            if task.staging is None:
                return
            if not onboard(self._runner, task.request):
                self._runner.staging_slots.release(task.staging)
                task.staging = None
                return
            task.started_at = self._runner.clock.monotonic()
            self._metrics.stage_seconds.labels(stage="queue").observe(task.started_at - task.queued_at)
            self._active.append(self._waiting.popleft())

    def _hand_over(self, task: PrefillTask, exit_D: torch.Tensor) -> None:
        """Put pages and tail under a lease and answer; a caller that has gone leaves nothing behind."""
        request, staging = task.request, task.staging
        assert staging is not None
        if not task.done.set_running_or_notify_cancel():
            self._end(task, Cancelled("the caller has gone"))
            return
        tail = self._runner.stage_tail(request, staging, exit_D)
        blocks = request.pages[: request.sealed_blocks]
        self._runner.blocks.pin(blocks)
        name = request.request_id
        promise = Promise(
            self._leases,
            readers=task.readers,
            ttl_s=self._lease_ttl_s,
            on_end=lambda: self._take_back(name, blocks, staging),
        )
        self._granted[name] = promise.leases
        task.staging = None
        self._runner.release(request)
        result = self._result(task, self._handle(request, promise.leases[0], blocks, tail), promise.leases[1:])
        self._metrics.requests.labels(outcome="ok").inc()
        self._metrics.stage_seconds.labels(stage="prefill").observe(result.run_ms / 1e3)
        self._metrics.tokens.labels(source="device").inc(result.cached_tokens)
        self._metrics.tokens.labels(source="computed").inc(result.computed_tokens)
        task.done.set_result(result)

    def _handle(
        self, request: RunningRequest, lease: LeaseId, blocks: list[PageId], tail: TailRef
    ) -> KVHandle:
        infos = self._runner.blocks.describe_all(blocks)
        return KVHandle(
            worker=self._worker,
            incarnation=self._incarnation,
            lease=lease,
            blocks=tuple(BlockRef(*info) for info in infos),
            tail=tail,
            tokens=request.length,
        )

    def _result(self, task: PrefillTask, handle: KVHandle, more_leases: Sequence[LeaseId]) -> PrefillResult:
        span, now = task.request.span, self._runner.clock.monotonic()
        return PrefillResult(
            handle=handle,
            cached_tokens=span.publish_from,
            replayed_rows=span.replayed_rows,
            computed_tokens=task.request.prompt_tokens - span.publish_from,
            queue_ms=1e3 * (task.started_at - task.queued_at),
            run_ms=1e3 * (now - task.started_at),
            more_leases=tuple(more_leases),
            prompt_logprobs=None if task.scorer is None else task.scorer.result(),
        )

    def _take_back(self, name: str, blocks: list[PageId], staging: Slot) -> None:
        """Runs in whichever thread ends the last lease."""
        self._granted.pop(name, None)
        self._runner.blocks.release(blocks)
        self._runner.staging_slots.release(staging)

    def _end(self, task: PrefillTask, error: ServiceError) -> None:
        """Free what a task holds and tell its caller, if there still is one."""
        self._runner.release(task.request)
        if task.staging is not None:
            self._runner.staging_slots.release(task.staging)
            task.staging = None
        self._metrics.requests.labels(outcome=error.code).inc()
        _tell(task, error)

    def _count_queued(self) -> None:
        self.queued_tokens = sum(task.request.remaining_rows for task in [*self._waiting, *self._active])


def _tell(task: PrefillTask, error: ServiceError) -> None:
    done = task.done
    if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
        done.set_exception(error)


def _part(task: PrefillTask, rows: int) -> Part:
    if task.scorer is not None:
        return Part(task.request, rows, Outputs.ALL)
    return Part(task.request, rows, Outputs.LAST if rows == task.request.remaining_rows else Outputs.NONE)


def _outputs(part: Part) -> int:
    """Exit vectors of a part."""
    return {Outputs.NONE: 0, Outputs.LAST: 1, Outputs.ALL: part.rows}[part.outputs]
