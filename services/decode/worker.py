"""The decode step loop's work: KV in, tokens out, one batch for all requests.

A step moves requests in and out as the batcher says, runs one row of every decoding request and some rows of those
that compute their KV here, draws one token for each row that left the model and for each exit vector that came with a
hand-off, and publishes all of them at once.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from epdserve.model.batch import Outputs
from epdserve.services.decode.admission import Admission
from epdserve.services.decode.deadlines import Deadlines
from epdserve.services.decode.grammar import Constraints
from epdserve.services.decode.sampler import Sampler
from epdserve.services.decode.task import DecodeTask
from epdserve.services.engine.chunks import share_budget
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.offload import Offloader
from epdserve.services.engine.runner import Part, Runner
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    Overloaded,
    ServiceError,
    Unavailable,
)
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import DecodeJob, ErrorInfo, FinishReason, TokenChunk

log = logging.getLogger(__name__)


class DecodeWorker:
    """Requests of one worker. Owned by the step loop, not thread-safe; ``new_task`` may be called anywhere.

    Args:
        worker: Name in receipts and errors.
        admission: Who is where; brings requests into the batch.
        publish: Takes the chunks of one step; must not block.
        chunk_tokens: Rows of a step for requests that compute their KV here.
        max_queued: Bound of the queue.
        offloader: Takes tails of requests that end well; None without a store.
        constraints: Keeps output to grammars; None refuses them.
    """

    def __init__(
        self,
        runner: Runner,
        admission: Admission,
        limits: RequestLimits,
        *,
        worker: str,
        publish: Callable[[Sequence[TokenChunk]], None],
        chunk_tokens: int,
        max_queued: int,
        offloader: Offloader | None = None,
        constraints: Constraints | None = None,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._runner, self._admission, self._limits, self._worker = runner, admission, limits, worker
        self._publish, self._chunk_tokens, self._max_queued = publish, chunk_tokens, max_queued
        self._offloader, self._constraints, self._deadlines = offloader, constraints, Deadlines()
        self._metrics = metrics or EngineMetrics.unregistered()
        self._sampler = Sampler(runner.backbone)
        self._tasks: dict[str, DecodeTask] = {}

    @property
    def idle(self) -> bool:
        """Whether no request is here, and none that was cancelled is still being pulled."""
        return not self._tasks and not self._admission.pulling

    @property
    def waiting(self) -> int:
        """Requests in the queue, or on their way into it."""
        return self._admission.waiting

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return self._admission.running

    @property
    def active(self) -> int:
        """Requests in the batch, or being pulled."""
        return self._admission.running + self._admission.pulling

    @property
    def queued_tokens(self) -> int:
        """Tokens of requests that wait."""
        return self._admission.queued_tokens

    @property
    def swapped_bytes(self) -> int:
        """Host memory that holds preempted requests."""
        return self._admission.swapped_bytes

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt and output that are taken."""
        return self._limits.max_context_tokens

    def oldest_waiting_s(self) -> float:
        """How long the first request in the queue has waited."""
        return self._admission.oldest_waiting_s()

    @property
    def tasks(self) -> int:
        """Requests in any phase."""
        return len(self._tasks)

    def new_task(self, job: DecodeJob) -> DecodeTask:
        """Check a job and make a task of it. Output ends where the context does, whatever ``max_tokens`` says.

        Raises:
            InvalidRequest: Empty, without room for a token, a token id outside the vocabulary, no tenant key, a
                grammar that nothing here enforces.
        """
        task = DecodeTask.of(
            job,
            eos_token_id=self._runner.backbone.config.eos_token_id,
            max_context_tokens=self._limits.max_context_tokens,
            now=self._runner.clock.monotonic(),
            cuts=self._runner.cuts if job.deterministic else None,
        )
        self._limits.check(task.request.known, job.tenant_key, max_new_tokens=0)
        if task.constraint is not None and self._constraints is None:
            raise InvalidRequest("this worker enforces no grammars", param="response_format")
        if task.max_tokens < 1:
            raise InvalidRequest(
                f"{len(job.tokens)} prompt tokens leave no room in a context of {self._limits.max_context_tokens}",
                param="messages",
            )
        return task

    def enqueue(self, task: DecodeTask) -> None:
        """Take a task into the queue, or end it with an error."""
        request_id = task.request.request_id
        if request_id in self._tasks:
            log.error("request id used twice", extra={"request": request_id})
            return
        self._tasks[request_id] = task
        self._deadlines.add(task)
        if self._admission.waiting >= self._max_queued:
            message = f"{self._max_queued} requests wait for this worker"
            self._publish([self._fail(task, Overloaded(message, worker=self._worker, retry_after_s=1.0))])
        elif task.produced >= task.max_tokens:  # resumed after its last token, before its end was told
            self._publish([self._finish(task, (), FinishReason.LENGTH)])
        else:
            self._admission.enqueue(task)
            if self._constraints is not None and task.constraint is not None:
                self._begin_grammar(task, self._constraints)

    def _begin_grammar(self, task: DecodeTask, constraints: Constraints) -> None:
        try:
            constraints.begin(task)
        except ServiceError as error:
            self._publish([self._fail(task, error)])

    def cancel(self, request_id: str) -> None:
        """Drop a request wherever it is and free what it holds; unknown ids are ignored."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            self._admission.remove(task)
            self._metrics.requests.labels(outcome="cancelled").inc()

    def fail_all(self, error: ServiceError) -> None:
        """End every request with ``error``."""
        self._publish([self._fail(task, error) for task in list(self._tasks.values())])

    def step(self) -> bool:
        """Run one step; whether there was anything to do."""
        began = self._runner.clock.monotonic()
        self._end_some(began)
        change = self._admission.rearrange()
        if self._fail_blind(change.ready):
            return True
        ready = [task for task in change.ready if not task.waits_for_grammar]
        fresh = [task for task in ready if task.exit_D is not None]
        work = self._rows([task for task in ready if task.exit_D is None])
        if not work and not fresh:
            return self._fail_stuck(change.stalled) or change.moved
        drawing = [task for task, rows in work if rows == task.request.remaining_rows] + fresh
        if self._constraints is not None:
            self._constraints.start_masks(
                [task.constraint for task in drawing if task.constraint is not None]
            )
        exits = [self._runner.run([_part(task, rows) for task, rows in work])] if work else []
        if drawing:
            exits += [task.exit_D[None] for task in fresh if task.exit_D is not None]
            self._draw(drawing, torch.cat(exits))
        self._count(work, len(drawing))
        self._metrics.step_seconds.observe(self._runner.clock.monotonic() - began)
        return True

    def _fail_blind(self, tasks: Sequence[DecodeTask]) -> bool:
        """End requests that would compute rows of an image here: only a prefill worker gets its embeddings.

        The router takes it for a lost lease and has the prompt prefilled again.
        """
        blind = [task for task in tasks if task.request.images and task.request.blind_images]
        message = "the KV of an image is not here any more"
        if blind:
            self._publish([self._fail(task, LeaseLost(message, worker=self._worker)) for task in blind])
        return bool(blind)

    def _end_some(self, now: float) -> None:
        """End what waits no longer, and what its grammar ends before the first draw."""
        chunks = [
            self._fail(task, DeadlineExceeded("the deadline of the request passed", worker=self._worker))
            for task in self._deadlines.expired(now)
        ]
        for task, error in self._constraints.settle() if self._constraints is not None else ():
            chunks.append(
                self._finish(task, (), FinishReason.STOP) if error is None else self._fail(task, error)
            )
        if chunks:
            self._publish(chunks)

    def _draw(self, tasks: Sequence[DecodeTask], exit_RD: torch.Tensor) -> None:
        """One token for each task, told to whoever waits."""
        masks = self._constraints.take_masks() if self._constraints is not None else {}
        drawn = self._sampler.draw(tasks, exit_RD, masks)
        self._publish(
            [
                self._advance(task, token, drawn.logprobs.get(row))
                for row, (task, token) in enumerate(zip(tasks, drawn.tokens, strict=True))
            ]
        )

    def _rows(self, tasks: Sequence[DecodeTask]) -> list[tuple[DecodeTask, int]]:
        """Rows of each task in this step: one while it decodes, a share of the budget while it catches up."""
        late = [task for task in tasks if task.request.remaining_rows > 1]
        shares = share_budget([task.request.piece_rows for task in late], budget=self._chunk_tokens)
        rows = {id(task): share for task, share in zip(late, shares, strict=True)}
        return [(task, count) for task in tasks if (count := rows.get(id(task), 1))]

    def _advance(self, task: DecodeTask, token: int, told: TokenLogprob | None) -> TokenChunk:
        constraint = task.constraint
        if constraint is not None and constraint.error is not None:
            return self._fail(task, constraint.error)
        task.exit_D = None
        task.request.append(token)
        task.steps += 1
        logprobs = () if told is None else (told,)
        if constraint is not None:
            constraint.follow()
        reason = task.finish_reason(token)
        if reason is not None:
            return self._finish(task, (token,), reason, logprobs)
        return TokenChunk(task.request.request_id, task.produced - 1, (token,), logprobs=logprobs)

    def _finish(
        self,
        task: DecodeTask,
        tokens: tuple[int, ...],
        reason: FinishReason,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> TokenChunk:
        offset = task.produced - len(tokens)
        receipt = task.receipt(self._worker, self._runner.clock.monotonic())
        self._keep_tail(task)
        self._drop(task)
        self._metrics.requests.labels(outcome=reason.value).inc()
        for stage, milliseconds in (
            ("queue", receipt.queue_ms),
            ("handoff", receipt.handoff_ms),
            ("decode", receipt.decode_ms),
        ):
            self._metrics.stage_seconds.labels(stage=stage).observe(milliseconds / 1e3)
        return TokenChunk(task.request.request_id, offset, tokens, reason, receipt=receipt, logprobs=logprobs)

    def _keep_tail(self, task: DecodeTask) -> None:
        """Offer the state in which a request ends well: its next turn goes on from there."""
        request = task.request
        if self._offloader is None or not task.job.keep_tail or request.slot is None or request.private:
            return
        if request.cuts is not None:
            return  # nobody could go on from it: hits of deterministic requests end at cuts
        if request.span.resumes_at(request.next_row, self._runner.window):
            self._offloader.offer_tail(request)

    def _fail(self, task: DecodeTask, error: ServiceError) -> TokenChunk:
        self._drop(task)
        self._metrics.requests.labels(outcome=error.code).inc()
        return TokenChunk(task.request.request_id, task.produced, (), error=ErrorInfo.of(error))

    def _drop(self, task: DecodeTask) -> None:
        del self._tasks[task.request.request_id]
        self._admission.remove(task)

    def _fail_stuck(self, stalled: Sequence[DecodeTask]) -> bool:
        """End the requests that nothing can make room for: quarantined pages may stay away for long."""
        if not stalled or self._admission.pulling:
            return False
        error = Unavailable("no page comes free on this worker", worker=self._worker)
        self._publish([self._fail(task, error) for task in stalled])
        return True

    def _count(self, work: Sequence[tuple[DecodeTask, int]], drawn: int) -> None:
        rows = sum(count for _, count in work)
        decoded = sum(1 for _, count in work if count == 1)
        self._metrics.rows.labels(kind="decode").inc(decoded)
        self._metrics.rows.labels(kind="catch_up").inc(rows - decoded)
        self._metrics.tokens.labels(source="sampled").inc(drawn)


def _part(task: DecodeTask, rows: int) -> Part:
    request = task.request
    return Part(request, rows, Outputs.LAST if rows == request.remaining_rows else Outputs.NONE)
