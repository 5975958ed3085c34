"""A prompt inside a prefill worker."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from epdserve.kvstore.slots import Slot
from epdserve.model.batch import Outputs
from epdserve.services.engine.preparing import Prepared
from epdserve.services.engine.requests import RunningRequest
from epdserve.services.engine.runner import Part
from epdserve.services.errors import ServiceError
from epdserve.services.policy.order import USUAL_TARGET_S, WaitingPrompt
from epdserve.services.prefill.scoring import PromptScorer
from epdserve.services.schedule import UNHURRIED, Schedule
from epdserve.services.types import PrefillResult, TokenSources

# Until the first prompt has been measured
_FIRST_TOKENS_PER_S: Final = 10_000.0


@dataclass(slots=True, eq=False)
class PrefillTask:
    """One prompt on its way through the worker.

    Attributes:
        tail_at: Where a tail is to be kept; None from when that was done, or turned out to be impossible.
        schedule: How urgent it is.
        ready: It may start; False while its blocks are being brought up.
        prepared: What was brought up, until the prompt has started.
        staging: Where its tail will lie for its readers.
    """

    request: RunningRequest
    queued_at: float
    readers: int = 1
    scorer: PromptScorer | None = None
    tail_at: int | None = None
    schedule: Schedule = UNHURRIED
    done: Future[PrefillResult] = field(default_factory=Future)
    started_at: float = 0.0
    staging: Slot | None = None
    ready: bool = True
    unwanted: bool = False  # its cancellation is queued; any thread sets it
    prepared: Prepared = field(default_factory=Prepared)
    sources: TokenSources = field(default_factory=TokenSources)

    def waiting_prompt(self, tokens_per_s: float) -> WaitingPrompt:
        """Itself as the order of prompts sees it, at a worker's measured speed (0 = not measured yet)."""
        schedule = self.schedule
        return WaitingPrompt(
            self.request.request_id,
            self.queued_at - schedule.waited_s,
            schedule.target_s or USUAL_TARGET_S,
            self.request.remaining_rows / (tokens_per_s or _FIRST_TOKENS_PER_S),
            schedule.priority,
            schedule.excess,
        )

    def tell(self, error: ServiceError) -> None:
        """Answer with an error, if somebody still listens."""
        done = self.done
        if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
            done.set_exception(error)

    def part(self, rows: int) -> Part:
        """Its rows of the next step; a step ends where a tail is to be kept."""
        request = self.request
        if self.tail_at is not None and request.next_row < self.tail_at:
            rows = min(rows, self.tail_at - request.next_row)
        if self.scorer is not None:
            return Part(request, rows, Outputs.ALL)
        return Part(request, rows, Outputs.LAST if rows == request.remaining_rows else Outputs.NONE)


def outputs_of(part: Part) -> int:
    """Exit vectors of a part."""
    return {Outputs.NONE: 0, Outputs.LAST: 1, Outputs.ALL: part.rows}[part.outputs]
