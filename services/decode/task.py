"""A request inside a decode worker."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch
from epdserve.model.replay import CanonicalCuts, PrefillSpan
from epdserve.services.decode.grammar import Constraint
from epdserve.services.decode.preemption import Swapped
from epdserve.services.decode.tally import TokenTally
from epdserve.services.engine.preparing import Prepared
from epdserve.services.engine.requests import RequestImage, RunningRequest
from epdserve.services.policy.forecast import LengthForecast
from epdserve.services.policy.order import Running, keeping
from epdserve.services.types import (
    DecodeJob,
    DecodeReceipt,
    FinishReason,
    KVHandle,
    SamplingParams,
    TokenSources,
)

_PULLED = PrefillSpan(first_row=0, publish_from=0, encoder_floor=0, decoder_from=0, decoder_floor=0)


class Phase(StrEnum):
    """Where a task is; every task in the worker's books is in exactly one."""

    PREPARING = "preparing"  # what the machine's store has of it is coming up; it holds at most a tail's slot
    WAITING = "waiting"  # for a state slot and pages
    PULLING = "pulling"  # its KV is on the way; holds slot and pages, the transfer may write into them
    RUNNING = "running"
    PREEMPTED = "preempted"  # its state lies in host memory, or is to be computed again
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class DecodeTask:
    """One request and what its receipt will say. Owned by the step loop.

    Attributes:
        arrival: Number in the order of arrival.
        handle: Where its KV is; None once it is here, or is to be computed here.
        exit_D: (hidden,) exit vector that came with the KV, until the first token is drawn from it.
        prepared: What was brought up from the store, until it has started.
        sources: Where its KV came from if it was started here from its token ids.
        swapped: Its state while PREEMPTED; None if it is to be computed again.
        constraint: Its place in its grammar.
        tally: What penalties count, once something was counted.
        deadline_at: When nobody waits for it any more.
        stop_ids: Tokens that end it.
        max_tokens: Tokens it may produce in all, cut where the context ends.
    """

    job: DecodeJob
    request: RunningRequest
    stop_ids: frozenset[int]
    max_tokens: int
    handle: KVHandle | None
    queued_at: float
    arrival: int = -1
    phase: Phase = Phase.WAITING
    exit_D: torch.Tensor | None = None
    swapped: Swapped | None = None
    prepared: Prepared = field(default_factory=Prepared)
    sources: TokenSources = field(default_factory=TokenSources)
    started_at: float | None = None
    running_at: float | None = None
    pulled_tokens: int = 0
    own_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    constraint: Constraint | None = None
    tally: TokenTally | None = None
    deadline_at: float | None = None
    _forecast: LengthForecast | None = None

    @classmethod
    def of(
        cls,
        job: DecodeJob,
        *,
        eos_token_id: int,
        max_context_tokens: int,
        now: float,
        cuts: CanonicalCuts | None = None,
    ) -> "DecodeTask":
        """A task for a job, with room for all tokens it may produce.

        A pulled prefill ended with the tokens already delivered; one computed here ends where the prompt does, so that
        the same rows are dropped by decoder replay as when the request first ran, unless a hit reaches beyond it. The
        prefill of a deterministic request always ends where the prompt does.
        """
        known = np.concatenate([job.tokens, job.emitted]).astype(np.int64)
        max_tokens = min(job.sampling.max_tokens, max_context_tokens - len(job.tokens))
        tokens = np.zeros(max(len(job.tokens) + max_tokens, len(known)), dtype=np.int64)
        tokens[: len(known)] = known
        request = RunningRequest(
            request_id=job.request_id,
            tokens=tokens,
            length=len(known),
            prompt_tokens=len(known) if job.handle is not None and cuts is None else len(job.tokens),
            tenant_key=job.tenant_key,
            exact=job.exact,
            span=_PULLED,
            resumed=len(job.emitted) > 0,
            images=tuple(map(RequestImage, job.images)),
            cuts=cuts,
        )
        stop_ids = set(job.sampling.stop_token_ids)
        if not job.sampling.ignore_eos:
            stop_ids.add(eos_token_id)
        task = cls(job, request, frozenset(stop_ids), max_tokens, job.handle, now)
        if job.grammar is not None:
            task.constraint = Constraint(request, job.grammar, prompt_tokens=len(job.tokens))
        if job.timeout_s is not None:
            task.deadline_at = now + job.timeout_s
        return task

    @property
    def ended(self) -> bool:
        """Whether it is over, one way or the other."""
        return self.phase is Phase.ENDED

    @property
    def waits_for_grammar(self) -> bool:
        """Whether nothing can be drawn for it yet."""
        return self.constraint is not None and not self.constraint.ready

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are drawn."""
        return self.job.sampling

    @property
    def produced(self) -> int:
        """Tokens of its output so far, those of earlier workers included; offset of the next one."""
        return self.request.length - len(self.job.tokens)

    def worth(self) -> tuple[int, float]:
        """What it is worth where it is, for the choice of who gives way; without a forecast its priority alone says."""
        schedule = self.job.schedule
        if not schedule.lengths:
            return schedule.priority, 0.0
        if self._forecast is None:
            self._forecast = LengthForecast(
                max(1.0, schedule.lengths[0]), max(1.0, *schedule.lengths), schedule.lengths
            )
        request = self.request
        running = Running(
            request.request_id, request.length, self.produced, self._forecast, schedule.priority
        )
        return keeping(running)

    def finish_reason(self, token: int) -> FinishReason | None:
        """Whether the token just appended ends the request."""
        if self.constraint is not None and self.constraint.complete:
            return FinishReason.STOP
        if token in self.stop_ids and self.produced >= self.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.produced >= self.max_tokens else None

    def receipt(self, worker: str, now: float) -> DecodeReceipt:
        """What decoding took."""
        started = now if self.started_at is None else self.started_at
        running = now if self.running_at is None else self.running_at
        return DecodeReceipt(
            worker=worker,
            pulled_tokens=self.pulled_tokens,
            own_tokens=self.own_tokens,
            recomputed_tokens=self.recomputed_tokens,
            steps=self.steps,
            preemptions=self.preemptions,
            queue_ms=1e3 * (started - self.queued_at),
            handoff_ms=1e3 * (running - started),
            decode_ms=1e3 * (now - running),
            sources=self.sources,
        )
