"""Who is in the batch: queue, hand-offs, preempted requests, and the moves between them."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from epdserve.kvstore.errors import OutOfPages
from epdserve.services.decode.batcher import Claim, Holder, plan_step
from epdserve.services.decode.ingest import Arrival, HandleRefused, Ingest
from epdserve.services.decode.preemption import SwapSpace
from epdserve.services.decode.pulling import PullDriver, PullOutcome
from epdserve.services.decode.task import DecodeTask, Phase
from epdserve.services.engine.metrics import EngineMetrics
from epdserve.services.engine.offload import Offloader
from epdserve.services.engine.onboard import onboard
from epdserve.services.engine.preparing import Prepared, sources_of
from epdserve.services.engine.runner import Runner
from epdserve.services.types import KVHandle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """State of the batch for the next step.

    Attributes:
        ready: Requests with a place for their next rows.
        stalled: Running requests that must skip the step.
        moved: Whether anything came in or went out.
    """

    ready: list[DecodeTask]
    stalled: list[DecodeTask]
    moved: bool


class Admission:
    """Keeps every task in one phase and its pages accounted for. Owned by the step loop, not thread-safe.

    Args:
        submit: Puts a command into the step loop; used from the event loop when a pull has ended.
        prepare: Begins to bring up what the store has of a task; ``prepared`` follows, unless it says False.
        stop_preparing: Ends that early.
        offloader: Told of blocks that were hit here; None without a store.
    """

    def __init__(
        self,
        runner: Runner,
        ingest: Ingest,
        swap: SwapSpace,
        driver: PullDriver,
        *,
        submit: Callable[[Callable[[], None]], None],
        metrics: EngineMetrics,
        prepare: Callable[[DecodeTask], bool] = lambda task: False,
        stop_preparing: Callable[[DecodeTask], None] = lambda task: None,
        offloader: Offloader | None = None,
    ) -> None:
        self._runner, self._ingest, self._swap, self._driver = runner, ingest, swap, driver
        self._submit, self._metrics = submit, metrics
        self._prepare, self._stop_preparing, self._offloader = prepare, stop_preparing, offloader
        self._preparing: set[DecodeTask] = set()
        self._waiting: deque[DecodeTask] = deque()
        self._running: list[DecodeTask] = []
        self._preempted: list[DecodeTask] = []
        self._pulling: dict[DecodeTask, Arrival] = {}
        self._arrivals = 0
        self.queued_tokens = 0  # read by heartbeats from another thread

    @property
    def waiting(self) -> int:
        """Requests in the queue, or on their way into it."""
        return len(self._waiting) + len(self._preparing)

    @property
    def pulling(self) -> int:
        """Hand-offs under way."""
        return len(self._pulling)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def swapped_bytes(self) -> int:
        """Host memory that holds preempted requests."""
        return self._swap.used_bytes

    def oldest_waiting_s(self) -> float:
        """How long the first request in the queue has waited."""
        try:
            return self._runner.clock.monotonic() - self._waiting[0].queued_at
        except IndexError:  # a metrics scrape may look while the loop takes the last one
            return 0.0

    def enqueue(self, task: DecodeTask) -> None:
        """Take a new task."""
        task.arrival = self._arrivals
        self._arrivals += 1
        if task.handle is None:
            self._wait_prepared(task)
        else:
            self._waiting.append(task)
        self._count_queued()

    def prepared(self, task: DecodeTask, prepared: Prepared) -> None:
        """Let a task into the queue, now that what the store has of it is here; one that has ended gives it back."""
        task.prepared = prepared
        if task.phase is not Phase.PREPARING:
            self._drop_tail(task)
            return
        self._preparing.remove(task)
        task.phase = Phase.WAITING
        if self._waiting and task.arrival < self._waiting[0].arrival:
            self._waiting.appendleft(task)
        else:
            self._waiting.append(task)

    def remove(self, task: DecodeTask) -> None:
        """Take a task out wherever it is and free what it holds; a pull frees its places when it has ended."""
        match task.phase:
            case Phase.WAITING if task in self._waiting:
                self._waiting.remove(task)
            case Phase.PREPARING:
                self._preparing.remove(task)
                self._stop_preparing(task)
            case Phase.PULLING:
                self._ingest.cancel(self._pulling[task])
            case Phase.RUNNING:
                self._running.remove(task)
                self._runner.release(task.request)
            case Phase.PREEMPTED:
                self._preempted.remove(task)
                if task.swapped is not None:
                    self._swap.forget(task.swapped)
        if task.phase is not Phase.PULLING and task.handle is not None:
            self._driver.end_lease_soon(task.handle)
        self._drop_tail(task)
        task.phase = Phase.ENDED
        self._count_queued()

    def rearrange(self) -> Change:
        """Move requests in and out as the batcher says, and give those that run their next page."""
        free_slots = self._runner.state_slots.counts().free
        plan = plan_step(
            [self._holder(task) for task in self._running],
            [self._claim(task) for task in self._preempted],
            [self._claim(task) for task in islice(self._waiting, free_slots)],
            free_pages=self._runner.blocks.available(),
            free_slots=free_slots,
            others_hold_pages=bool(self._pulling),
        )
        by_arrival = {task.arrival: task for task in [*self._running, *self._preempted]}
        for arrival in plan.preempt:
            self._preempt(by_arrival[arrival])
        resumed = sum(self._resume(by_arrival[arrival]) for arrival in plan.resume)
        admitted = 0
        while admitted < plan.admit and self._admit(self._waiting[0]):
            admitted += 1
        stalled = [task for task in self._running if task.arrival in plan.stalled]
        ready = [task for task in self._running if task.arrival not in plan.stalled]
        moved = bool(plan.preempt or resumed or admitted)
        if moved:
            self._count_queued()
        return Change(ready, stalled, moved) if self._grow(ready) else Change([], [], moved=True)

    def _holder(self, task: DecodeTask) -> Holder:
        request = task.request
        growth = request.pages_missing(request.length, self._runner.block_tokens)
        return Holder(task.arrival, len(request.pages), growth, task.worth())

    def _claim(self, task: DecodeTask) -> Claim:
        return Claim(task.arrival, -(-(task.request.length + 1) // self._runner.block_tokens))

    def _grow(self, tasks: list[DecodeTask]) -> bool:
        """Reserve what the next rows need; False if preempted pages turned out to be shared, so plan again."""
        block_tokens = self._runner.block_tokens
        missing = [task.request.pages_missing(task.request.length, block_tokens) for task in tasks]
        if not any(missing):
            return True
        try:
            pages = self._runner.blocks.reserve(sum(missing))
        except OutOfPages:
            return False
        for task, count in zip(tasks, missing, strict=True):
            task.request.pages += [pages.pop() for _ in range(count)]
        return True

    def _admit(self, task: DecodeTask) -> bool:
        """Start the pull of a waiting task, or its computation here; False if there is no room after all."""
        started_at = self._runner.clock.monotonic()
        if task.handle is not None and not self._begin_pull(task, task.handle):
            return False
        if task.handle is None:
            if not self._start_here(task):
                return False
            task.running_at = started_at
            self._running.append(task)
        task.started_at = task.started_at or started_at
        self._waiting.popleft()
        return True

    def _start_here(self, task: DecodeTask) -> bool:
        """Give a task its place to compute what is not held; False if there is no room."""
        request, tail = task.request, task.prepared.tail
        if not onboard(self._runner, request, tail.tail if tail else None):
            return False
        self._drop_tail(task)
        task.sources = sources_of(self._runner, request, task.prepared)
        task.own_tokens, task.recomputed_tokens = task.sources.device, task.sources.computed
        task.phase = Phase.RUNNING
        self._metrics.count_sources(task.sources)
        if self._offloader is not None:
            self._offloader.touch(request.hashes[: request.sealed_blocks])
        return True

    def _wait_prepared(self, task: DecodeTask) -> None:
        """Into the queue by way of the store; in front of it if it came earlier than those there."""
        task.phase = Phase.PREPARING
        self._preparing.add(task)
        if not self._prepare(task):
            self.prepared(task, Prepared())

    def _drop_tail(self, task: DecodeTask) -> None:
        """Give the slot of a tail that was brought up back: it was used, or nobody wants it any more."""
        if task.prepared.tail is not None:
            self._runner.staging_slots.release(task.prepared.tail.staging)
            task.prepared.tail = None

    def _begin_pull(self, task: DecodeTask, handle: KVHandle) -> bool:
        def ended(outcome: PullOutcome) -> None:
            self._submit(lambda: self._pull_ended(task, outcome))

        try:
            arrival = self._ingest.begin(task.request, handle, ended)
        except HandleRefused as error:
            log.warning("handle refused", extra={"peer": handle.worker, "reason": str(error)})
            self._metrics.handoffs.labels(outcome=PullOutcome.REFUSED.value).inc()
            self._driver.end_lease_soon(handle)
            task.handle = None
            return True
        if arrival is None:
            return False
        task.phase = Phase.PULLING
        self._pulling[task] = arrival
        return True

    def _pull_ended(self, task: DecodeTask, outcome: PullOutcome) -> None:
        arrival = self._pulling.pop(task)
        wanted = task.phase is Phase.PULLING
        outcome = self._ingest.end(arrival, outcome if wanted else PullOutcome.CANCELLED)
        self._metrics.handoffs.labels(outcome=outcome.value).inc()
        if not wanted:
            return
        task.handle = None
        if outcome is not PullOutcome.DONE:
            self._wait_prepared(task)
            return
        task.phase, task.exit_D = Phase.RUNNING, arrival.exit_D
        task.running_at = self._runner.clock.monotonic()
        task.own_tokens = arrival.own_blocks * self._runner.block_tokens
        task.pulled_tokens = task.request.prompt_tokens - task.own_tokens
        task.recomputed_tokens += task.request.remaining_rows
        self._metrics.tokens.labels(source="pulled").inc(task.pulled_tokens)
        self._running.append(task)

    def _preempt(self, task: DecodeTask) -> None:
        request = task.request
        # half a recomputation is not worth keeping: it starts over
        if request.remaining_rows <= 1:
            task.swapped = self._swap.move_out(request)
        else:
            self._runner.release(request)
        self._metrics.preemptions.labels(how="swap" if task.swapped else "recompute").inc()
        task.preemptions += 1
        task.phase = Phase.PREEMPTED
        self._running.remove(task)
        self._preempted.append(task)

    def _resume(self, task: DecodeTask) -> bool:
        if task.swapped is not None:
            if not self._swap.move_in(task.request, task.swapped):
                return False
            task.swapped = None
        else:
            if not onboard(self._runner, task.request):
                return False
            task.exit_D = None
            task.recomputed_tokens += task.request.length - task.request.span.publish_from
        task.phase = Phase.RUNNING
        self._preempted.remove(task)
        self._running.append(task)
        return True

    def _count_queued(self) -> None:
        self.queued_tokens = sum(task.request.length for task in self._waiting)
