"""What this router has learnt of workers and answers: speeds, failures, lengths. Placement and admission ask here.

Everything is measured from what workers return with their results, so that it holds for any device and any load.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import monotonic
from typing import Final

import numpy as np
from epdserve.services.policy.forecast import LengthForecast, fixed
from epdserve.services.policy.health import Seen, faded, fading, trouble_s
from epdserve.services.policy.length_model import LengthModel, PromptClass
from epdserve.services.policy.links import LinkModel
from epdserve.services.policy.pools import Floats, Indices
from epdserve.services.policy.settings import USUAL, PolicySettings
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.worker_rows import WorkerRows
from epdserve.services.types import DecodeReceipt, FinishReason, PrefillResult

# Of the released model, with its blocks' headers; a smaller model's are taken for the same
KV_BYTES_PER_TOKEN: Final = 896.0
# Until something was measured; only their relation to each other matters then
_PREFILL_TOKENS_PER_S: Final = 10_000.0
_STEP_S: Final = 0.02
# What one more request adds to a step, as a share of it: until it shows, and at least and at most
_REQUEST_SHARE: Final = 0.01
_SHARES: Final = (0.001, 0.3)
# Weight of that guess, in squared requests more or fewer than usual; and what is left of older news with each new one
_GUESS_WEIGHT: Final = 20.0
_KEPT: Final = 0.99
# Of a step, at least so much is there without anybody
_ALONE: Final = 0.1
_NEWEST: Final = 0.2
# Results that computed less say more of fixed costs than of speed
_MIN_COMPUTED_TOKENS: Final = 64
# With fewer answers than this behind it the model is as good as blind, and a fixed length is counted on
_MIN_ANSWERS: Final = 16
# What is remembered of a worker
_SPEED, _STEP, _CALLS, _FAILURES, _COUNTED_AT, _COMPANY = range(6)
_FIELDS: Final = 6


@dataclass(slots=True)
class HitCounts:
    """Prompt tokens that placement expected to find where it sent them, and those that were not found there."""

    expected_tokens: int = 0
    missed_tokens: int = 0
    prefills: int = 0
    misrouted: int = 0


class Estimates:
    """Owned by the event loop. Bounded by the workers that are alive (``keep``) and by the length model's cells.

    Attributes:
        failures: Calls that ever failed.

    Args:
        blind_tokens: The length counted on while the model knows nothing.
        clock: Seconds, monotonic.
        policy: Of the length model, of health, and what is believed of links until they are measured.
    """

    def __init__(
        self,
        *,
        blind_tokens: int = 1024,
        clock: Callable[[], float] = monotonic,
        policy: PolicySettings = USUAL,
    ) -> None:
        self.lengths = LengthModel(policy.lengths)
        self.handoffs = LinkModel(policy.links)
        self._health = policy.health
        self.hits = HitCounts()
        self._blind = fixed(blind_tokens)
        self._clock = clock
        self._table = WorkerRows(_FIELDS)
        self.failures = 0
        # How steps go with requests, both less what is usual at their worker: sums of products and of squares
        self._with_requests = self._squares = 0.0

    def forecast(self, request: GenerateRequest) -> LengthForecast:
        """Expected output of a request, within what it allows."""
        if self.lengths.answers < _MIN_ANSWERS:
            return self._blind.capped(request.sampling.max_tokens)
        return self.lengths.forecast(prompt_class(request)).capped(request.sampling.max_tokens)

    def answered(self, request: GenerateRequest, tokens: int, reason: FinishReason) -> None:
        """Learn from an answer that ended by itself or at its limit."""
        kind, cut = prompt_class(request), reason is FinishReason.LENGTH
        # Of what was cut nobody knows whether the forecast was right
        forecast = None if cut else self.lengths.forecast(kind)
        self.lengths.observe(kind, tokens, forecast=forecast, cut=cut)

    def prefilled(self, worker: str, result: PrefillResult, *, expected_hit_tokens: int) -> None:
        """Learn from a prefill: the worker's speed, and whether its blocks were what the index said."""
        row = self._count(worker)
        if result.computed_tokens >= _MIN_COMPUTED_TOKENS and result.run_ms > 0:
            self._smooth(row, _SPEED, 1000 * result.computed_tokens / result.run_ms)
        missed = max(0, expected_hit_tokens - result.cached_tokens)
        self.hits.prefills += 1
        self.hits.expected_tokens += expected_hit_tokens
        self.hits.missed_tokens += missed
        self.hits.misrouted += missed > 0

    def decoded(self, worker: str, receipt: DecodeReceipt, *, running: int = 1) -> None:
        """Learn from a finished decode: how long its steps took.

        Args:
            running: Requests that were there with it, itself included.
        """
        row = self._count(worker)
        if receipt.steps and receipt.decode_ms > 0:
            took_s, (usual_s, usual) = receipt.decode_ms / 1000 / receipt.steps, self._usual(row)
            if usual_s:
                more = running - usual
                self._with_requests = _KEPT * self._with_requests + more * (took_s / usual_s - 1)
                self._squares = _KEPT * self._squares + more * more
            self._smooth(row, _STEP, took_s)
            self._smooth(row, _COMPANY, running)

    def handed_over(self, receipt: DecodeReceipt, *, same_machine: bool) -> None:
        """Learn from a hand-off that was pulled: how fast the link between two such workers is."""
        if receipt.pulled_tokens and not receipt.recomputed_tokens:
            self.handoffs.observe(
                same_machine=same_machine,
                nbytes=KV_BYTES_PER_TOKEN * receipt.pulled_tokens,
                seconds=receipt.handoff_ms / 1000,
            )

    def failed(self, worker: str) -> None:
        """A call to a worker failed."""
        row = self._count(worker)
        self._table.values[_FAILURES, row] += 1
        self.failures += 1

    def prefill_tokens_per_s(self, worker: str) -> float:
        """Measured speed; of one that has not been measured, that of the others."""
        return self._one(worker, _SPEED) or self._usual_of(_SPEED, _PREFILL_TOKENS_PER_S)

    def step_s(self, worker: str) -> float:
        """Measured time of a decode step; of a worker that has not been measured, that of the others."""
        return self._one(worker, _STEP) or self._usual_of(_STEP, _STEP_S)

    def now(self) -> float:
        """By the clock of these estimates."""
        return self._clock()

    @property
    def layout(self) -> int:
        """Changes when the numbers of ``rows`` do."""
        return self._table.layout

    def rows(self, workers: Collection[str]) -> Indices:
        """Numbers by which the following know these workers, while ``layout`` is what it is."""
        return self._table.rows(workers)

    def prefill_speeds(self, rows: Indices) -> Floats:
        """As ``prefill_tokens_per_s``, of several workers."""
        return self._measured(rows, _SPEED, _PREFILL_TOKENS_PER_S)

    def steps_s(self, rows: Indices) -> Floats:
        """As ``step_s``, of several workers."""
        return self._measured(rows, _STEP, _STEP_S)

    @property
    def request_share(self) -> float:
        """What one more request adds to a step, as a share of it."""
        found = self._with_requests + _REQUEST_SHARE * _GUESS_WEIGHT
        return min(_SHARES[1], max(_SHARES[0], found / (self._squares + _GUESS_WEIGHT)))

    def decode_steps_s(self, rows: Indices) -> tuple[Floats, Floats]:
        """Of several workers: a step without any request, and what each request adds to it."""
        step_s, company = self.steps_s(rows), self._table.values[_COMPANY].take(rows)
        request_s = self.request_share * step_s
        return np.maximum(_ALONE * step_s, step_s - request_s * company), request_s

    def troubles_s(self, rows: Indices, step_ages_s: Floats) -> Floats:
        """Delay to expect of workers beyond their queues (``policy/health.py``).

        Args:
            step_ages_s: How long each worker's present step had been running when it was heard of.
        """
        seen = self._table.values.take(rows, axis=1)
        kept = fading(self._clock() - seen[_COUNTED_AT])
        return trouble_s(
            Seen(
                step_age_s=step_ages_s,
                # A prefill step is a chunk and may take long on a slow device; a hang is longer still
                usual_step_s=np.maximum(1.0, seen[_STEP]),
                failures=seen[_FAILURES] * kept,
                calls=seen[_CALLS] * kept,
            ),
            self._health,
        )

    @property
    def workers(self) -> int:
        """Workers of which something is remembered."""
        return len(self._table)

    def keep(self, workers: Collection[str]) -> None:
        """Forget workers that are not among those alive, once they have become many."""
        self._table.keep(workers)

    def _usual(self, row: int) -> tuple[float, float]:
        """Step of a worker, and requests in it."""
        return float(self._table.values[_STEP, row]), float(self._table.values[_COMPANY, row])

    def _one(self, worker: str, field: int) -> float:
        return float(self._table.of(worker)[field])

    def _measured(self, rows: Indices, field: int, otherwise: float) -> Floats:
        found: Floats = self._table.values[field].take(rows)
        known = found > 0
        if known.all():
            return found
        return np.where(known, found, self._usual_of(field, otherwise))

    def _usual_of(self, field: int, otherwise: float) -> float:
        """What was measured, mean of all workers."""
        of_all = self._table.column(field)
        if not of_all.any():
            return otherwise
        return float(of_all[of_all > 0].mean())

    def _smooth(self, row: int, field: int, new: float) -> None:
        old = float(self._table.values[field, row])
        self._table.values[field, row] = new if not old else old + _NEWEST * (new - old)

    def _count(self, worker: str) -> int:
        """Count a call; the worker's row."""
        row = self._table.row(worker)
        now, values = self._clock(), self._table.of(worker)
        calls, failures, counted_at = values[_CALLS : _COUNTED_AT + 1].tolist()
        elapsed_s = now - counted_at
        values[_CALLS : _COUNTED_AT + 1] = (
            faded(calls, elapsed_s=elapsed_s) + 1,
            faded(failures, elapsed_s=elapsed_s),
            now,
        )
        return row


def prompt_class(request: GenerateRequest) -> PromptClass:
    """What of a request tells something about its answer's length."""
    return PromptClass(
        0 if request.effort is None else request.effort.level,
        request.tenant_key.hex()[:16],
        len(request.tokens),
        tools=request.tools or request.grammar is not None,
        turns=request.turn,
    )
