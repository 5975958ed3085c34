"""The prefill step loop's work: prompts in, KV under a lease out.

A prompt waits for a state slot, a staging slot and all of its pages at once, so that no two half-done prompts wait for
each other. Then its rows run in chunks beside those of other prompts; blocks are sealed, and so can be hit, as they
fill. At the end pages and tail are put under a lease, and the state slot is free.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.slots import Slot
from epdserve.kvstore.types import LeaseId, PageId
from epdserve.model.errors import ForwardStopped
from epdserve.model.replay import PrefillSpan
from epdserve.services.engine.chunks import first_come
from epdserve.services.engine.config import EngineSettings
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.offload import Offloader
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.preparing import Prepared, sources_of
from epdserve.services.engine.requests import RequestImage, RunningRequest, TokenArray
from epdserve.services.engine.runner import Runner
from epdserve.services.engine.speeds import SpeedMeter
from epdserve.services.engine.validation import RequestLimits
from epdserve.services.engine.waiting import WaitingQueue
from epdserve.services.errors import Cancelled, InvalidRequest, Overloaded, ServiceError
from epdserve.services.policy.order import rank
from epdserve.services.prefill.promise import Promise
from epdserve.services.prefill.scoring import PromptScorer
from epdserve.services.prefill.task import PrefillTask, outputs_of
from epdserve.services.types import BlockRef, KVHandle, PrefillJob, PrefillResult, TailRef

_NOT_STARTED = PrefillSpan(first_row=0, publish_from=0, encoder_floor=0, decoder_from=0, decoder_floor=0)


class ImageWants(Protocol):
    """What the worker asks of whoever fetches embeddings."""

    def want(self, task: PrefillTask) -> None:
        """Fetch what a prompt that has just got its place needs; ``arrived`` or ``image_failed`` follow."""

    def forget(self, task: PrefillTask) -> None:
        """The prompt has ended."""


class PrefillWorker:
    """Prompts of one worker. Owned by the step loop, not thread-safe; ``new_task`` may be called anywhere.

    Args:
        worker: Name in handles.
        incarnation: This life of the worker.
        lease_ttl_s: How long a handle is good for.
        offloader: Takes tails, and word of blocks that were hit here; None without a store.
        speeds: Told how fast prompts are computed.
        images: Fetches embeddings; None if no images are taken.
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
        offloader: Offloader | None = None,
        speeds: SpeedMeter | None = None,
        images: ImageWants | None = None,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self._runner, self._settings, self._leases = runner, settings, leases
        self._worker, self._incarnation, self._lease_ttl_s = worker, incarnation, lease_ttl_s
        self._metrics = metrics or EngineMetrics.unregistered()
        self._offloader, self._images = offloader, images
        self._speeds = speeds or SpeedMeter(runner.clock)
        self._limits = RequestLimits.of(runner, settings)
        self._waiting = WaitingQueue[PrefillTask](max_overtakes=settings.max_overtakes)
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

    running = active

    @property
    def swapped_bytes(self) -> int:
        """Nothing is ever moved out here."""
        return 0

    @property
    def idle(self) -> bool:
        """Whether no prompt is here; leases may still be open."""
        return not self._waiting and not self._active

    def oldest_waiting_s(self) -> float:
        """How long the first prompt in the queue has waited."""
        oldest = self._waiting.oldest()
        return 0.0 if oldest is None else self._runner.clock.monotonic() - oldest.queued_at

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
            images=self._images_of(job, tokens),
            cuts=self._runner.cuts if job.deterministic else None,
        )
        scorer = None
        if job.prompt_logprobs is not None:
            scorer = PromptScorer(self._runner.backbone, job.tokens, job.prompt_logprobs)
        now = self._runner.clock.monotonic()
        return PrefillTask(request, now, job.readers, scorer, job.tail_at, job.schedule)

    def arrived(self, task: PrefillTask, image: RequestImage, embeddings_ND: torch.Tensor) -> None:
        """Let the rows of an image run."""
        if task in self._active:
            image.embeddings_ND = embeddings_ND

    def image_failed(self, task: PrefillTask, error: ServiceError) -> None:
        """End a prompt one of whose images cannot be had."""
        if task in self._active:
            self._active.remove(task)
            self._end(task, error)
            self._count_queued()

    def _images_of(self, job: PrefillJob, tokens: TokenArray) -> tuple[RequestImage, ...]:
        if job.images and self._images is None:
            raise InvalidRequest("this worker takes no images", param="messages")
        image_token = self._runner.backbone.config.image_token_id
        for place in job.images:
            if (tokens[place.first_token : place.end] != image_token).any():
                raise InvalidRequest("an image stands where the prompt has text", param="messages")
        return tuple(RequestImage(place) for place in job.images)

    def enqueue(self, task: PrefillTask) -> None:
        """Take a task into the queue, or refuse it through its future."""
        if len(self._waiting) >= self._settings.max_queued:
            message = f"{len(self._waiting)} prompts wait for this worker"
            self._end(task, Overloaded(message, worker=self._worker, retry_after_s=1.0))
            return
        self._waiting.append(task)
        self._count_queued()

    def prepared(self, task: PrefillTask, prepared: Prepared) -> None:
        """Let a task start, now that what the store has of it is here; one that has ended gives it back."""
        task.prepared, task.ready = prepared, True
        if task not in self._waiting:
            self._drop_tail(task)

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
            task.tell(error)

    def step(self) -> bool:
        """Run one chunk of every prompt that has a place; whether there was anything to do."""
        self._leases.expire()
        self._start_waiting()
        if not self._active:
            return False
        began = self._runner.clock.monotonic()
        working = self._working()
        if not working:
            return False  # every prompt waits for an image
        parts = [task.part(rows) for task, rows in working]
        try:
            exits_RD = self._runner.run(
                parts,
                unwanted=lambda: all(task.unwanted for task, _ in working),
                then=lambda: [task.part(rows) for task, rows in self._working()],
            )
        except ForwardStopped:
            return True  # the commands that come next cancel them
        exits = exits_RD.split([outputs_of(part) for part in parts])
        for (task, _), part, exit_RD in zip(working, parts, exits, strict=True):
            if task.scorer is not None:
                task.scorer.take(task.request.next_row - part.rows, exit_RD)
            if task.request.next_row == task.tail_at:
                self._keep_tail(task)
            if not task.request.remaining_rows:
                self._active.remove(task)
                self._hand_over(task, exit_RD[-1])
        self._count_queued()
        rows, seconds = sum(part.rows for part in parts), self._runner.clock.monotonic() - began
        self._speeds.prefilled(rows, seconds)
        self._metrics.rows.labels(kind="prefill").inc(rows)
        self._metrics.step_seconds.observe(seconds)
        return True

    def _working(self) -> list[tuple[PrefillTask, int]]:
        """Who runs how many rows in a step that begins now."""
        rank = self._ranks()
        ready = [(task, rows) for task in sorted(self._active, key=rank) if (rows := task.request.ready_rows)]
        shares = first_come([rows for _, rows in ready], budget=self._settings.chunk_tokens)
        return [(task, rows) for (task, _), rows in zip(ready, shares, strict=True) if rows]

    def _start_waiting(self) -> None:
        order = self._ranks() if len(self._waiting) > 1 else None
        self._active += self._waiting.start(
            ready=lambda task: task.ready, try_start=self._try_start, order=order
        )

    def _ranks(self) -> Callable[[PrefillTask], tuple[int, float, float, str]]:
        """What prompts are sorted by now: the most urgent first (``policy/order.py``)."""
        now, speed = self._runner.clock.monotonic(), self._speeds.speeds().prefill_tokens_per_s
        return lambda task: rank(task.waiting_prompt(speed), now=now)

    def _try_start(self, task: PrefillTask) -> bool:
        request, runner = task.request, self._runner
        task.staging = runner.staging_slots.acquire()
        if task.staging is None:
            return False
        tail = task.prepared.tail
        if not onboard(runner, request, tail.tail if tail else None):
            runner.staging_slots.release(task.staging)
            task.staging = None
            return False
        self._drop_tail(task)
        if self._images is not None and request.images:
            self._images.want(task)
        task.sources = sources_of(runner, request, task.prepared)
        task.started_at = runner.clock.monotonic()
        self._metrics.stage_seconds.labels(stage="queue").observe(task.started_at - task.queued_at)
        if self._offloader is not None:
            self._offloader.touch(request.hashes[: request.sealed_blocks])
        if task.tail_at is not None and not (
            self._offloader is not None
            and request.cuts is None
            and request.span.resumes_at(task.tail_at, runner.window)
        ):
            task.tail_at = None
        return True

    def _keep_tail(self, task: PrefillTask) -> None:
        assert self._offloader is not None
        self._offloader.offer_tail(task.request)
        task.tail_at = None

    def _drop_tail(self, task: PrefillTask) -> None:
        """Give the slot of a tail that was brought up back: it was used, or nobody wants it any more."""
        if task.prepared.tail is not None:
            self._runner.staging_slots.release(task.prepared.tail.staging)
            task.prepared.tail = None

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
        result = self._result(
            task, self._handle(request, promise.leases[0], blocks, tail), promise.leases[1:]
        )
        self._metrics.requests.labels(outcome="ok").inc()
        self._metrics.stage_seconds.labels(stage="prefill").observe(result.run_ms / 1e3)
        self._metrics.count_sources(task.sources)
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
        request, now = task.request, self._runner.clock.monotonic()
        return PrefillResult(
            handle=handle,
            cached_tokens=request.hit_tokens,
            replayed_rows=request.replayed_rows,
            computed_tokens=request.prompt_tokens - request.hit_tokens,
            queue_ms=1e3 * (task.started_at - task.queued_at),
            run_ms=1e3 * (now - task.started_at),
            more_leases=tuple(more_leases),
            prompt_logprobs=None if task.scorer is None else task.scorer.result(),
            sources=task.sources,
        )

    def _take_back(self, name: str, blocks: list[PageId], staging: Slot) -> None:
        """Runs in whichever thread ends the last lease."""
        self._granted.pop(name, None)
        self._runner.blocks.release(blocks)
        self._runner.staging_slots.release(staging)

    def _end(self, task: PrefillTask, error: ServiceError) -> None:
        """Free what a task holds and tell its caller, if there still is one."""
        if self._images is not None and task.request.images:
            self._images.forget(task)
        self._runner.release(task.request)
        self._drop_tail(task)
        if task.staging is not None:
            self._runner.staging_slots.release(task.staging)
            task.staging = None
        self._metrics.requests.labels(outcome=error.code).inc()
        task.tell(error)

    def _count_queued(self) -> None:
        self.queued_tokens = sum(task.request.remaining_rows for task in [*self._waiting, *self._active])
