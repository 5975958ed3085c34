"""What this router has learnt of workers and answers: speeds, failures, lengths. Placement and admission ask here.

Everything is measured from what workers return with their results, so that it holds for any device and any load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final

from epdserve.services.policy.forecast import LengthForecast, fixed
from epdserve.services.policy.health import Seen, faded, trouble_s
from epdserve.services.policy.length_model import LengthModel, PromptClass
from epdserve.services.router.request import GenerateRequest
from epdserve.services.types import DecodeReceipt, FinishReason, PrefillResult, WorkerInfo

# Until something was measured; only their relation to each other matters then
_PREFILL_TOKENS_PER_S: Final = 10_000.0
_STEP_S: Final = 0.02
# What one more request adds to a step, as a share of it: nobody reports it, and equal workers need not know it
_REQUEST_SHARE: Final = 0.01
_NEWEST: Final = 0.2
# Results that computed less say more of fixed costs than of speed
_MIN_COMPUTED_TOKENS: Final = 64
# With fewer answers than this behind it the model is as good as blind, and a fixed length is counted on
_MIN_ANSWERS: Final = 16


@dataclass(slots=True)
class _Measured:
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    calls: float = 0.0
    failures: float = 0.0
    counted_at: float = 0.0


@dataclass(slots=True)
class HitCounts:
    """Prompt tokens that placement expected to find where it sent them, and those that were not found there."""

    expected_tokens: int = 0
    missed_tokens: int = 0
    prefills: int = 0
    misrouted: int = 0


class Estimates:
    """Owned by the event loop. Bounded by the workers that are alive (``keep``) and by the length model's cells.

    Args:
        blind_tokens: The length counted on while the model knows nothing.
        clock: Seconds, monotonic.
    """

    def __init__(self, *, blind_tokens: int = 1024, clock: Callable[[], float] = monotonic) -> None:
        self.lengths = LengthModel()
        self.hits = HitCounts()
        self._blind = fixed(blind_tokens)
        self._clock = clock
        self._workers: dict[str, _Measured] = {}

    def forecast(self, request: GenerateRequest) -> LengthForecast:
        """Expected output of a request, within what it allows."""
        if self.lengths.answers < _MIN_ANSWERS:
            return self._blind.capped(request.sampling.max_tokens)
        return self.lengths.forecast(prompt_class(request)).capped(request.sampling.max_tokens)

    def answered(self, request: GenerateRequest, tokens: int, reason: FinishReason) -> None:
        """Learn from an answer that ended by itself or at its limit."""
        kind = prompt_class(request)
        self.lengths.observe(
            kind, tokens, forecast=self.lengths.forecast(kind), cut=reason is FinishReason.LENGTH
        )

    def prefilled(self, worker: str, result: PrefillResult, *, expected_hit_tokens: int) -> None:
        """Learn from a prefill: the worker's speed, and whether its blocks were what the index said."""
        seen = self._count(worker)
        if result.computed_tokens >= _MIN_COMPUTED_TOKENS and result.run_ms > 0:
            speed = 1000 * result.computed_tokens / result.run_ms
            seen.prefill_tokens_per_s = _smooth(seen.prefill_tokens_per_s, speed)
        missed = max(0, expected_hit_tokens - result.cached_tokens)
        self.hits.prefills += 1
        self.hits.expected_tokens += expected_hit_tokens
        self.hits.missed_tokens += missed
        self.hits.misrouted += missed > 0

    def decoded(self, worker: str, receipt: DecodeReceipt) -> None:
        """Learn from a finished decode: how long its steps took."""
        seen = self._count(worker)
        if receipt.steps and receipt.decode_ms > 0:
            seen.step_s = _smooth(seen.step_s, receipt.decode_ms / 1000 / receipt.steps)

    def failed(self, worker: str) -> None:
        """A call to a worker failed."""
        self._count(worker).failures += 1

    def prefill_tokens_per_s(self, worker: str) -> float:
        """Measured speed; of one that has not been measured, that of the others."""
        seen = self._workers.get(worker)
        if seen is not None and seen.prefill_tokens_per_s:
            return seen.prefill_tokens_per_s
        return _mean((one.prefill_tokens_per_s for one in self._workers.values()), _PREFILL_TOKENS_PER_S)

    def step_s(self, worker: str) -> float:
        """Measured time of a decode step; of a worker that has not been measured, that of the others."""
        seen = self._workers.get(worker)
        if seen is not None and seen.step_s:
            return seen.step_s
        return _mean((one.step_s for one in self._workers.values()), _STEP_S)

    def request_s(self, worker: str) -> float:
        """What one more request is taken to add to a step."""
        return _REQUEST_SHARE * self.step_s(worker)

    def trouble_s(self, info: WorkerInfo) -> float:
        """Delay to expect of a worker beyond its queue (``policy/health.py``)."""
        seen = self._workers.get(info.worker)
        if seen is None:
            return trouble_s(Seen(step_age_s=info.step_age_s))
        self._fade(seen)
        return trouble_s(
            Seen(
                step_age_s=info.step_age_s,
                # A prefill step is a chunk and may take long on a slow device; a hang is longer still
                usual_step_s=max(1.0, seen.step_s),
                failures=seen.failures,
                calls=seen.calls,
            )
        )

    @property
    def workers(self) -> int:
        """Workers of which something is remembered."""
        return len(self._workers)

    def keep(self, workers: Sequence[str]) -> None:
        """Forget workers that are not among those alive, once they have become many."""
        if len(self._workers) <= 2 * len(workers) + 8:
            return
        alive = set(workers)
        for name in [name for name in self._workers if name not in alive]:
            del self._workers[name]

    def _count(self, worker: str) -> _Measured:
        seen = self._workers.setdefault(worker, _Measured(counted_at=self._clock()))
        self._fade(seen)
        seen.calls += 1
        return seen

    def _fade(self, seen: _Measured) -> None:
        now = self._clock()
        seen.calls = faded(seen.calls, elapsed_s=now - seen.counted_at)
        seen.failures = faded(seen.failures, elapsed_s=now - seen.counted_at)
        seen.counted_at = now


def prompt_class(request: GenerateRequest) -> PromptClass:
    """What of a request tells something about its answer's length."""
    return PromptClass(
        0 if request.effort is None else request.effort.level,
        request.tenant_key.hex()[:16],
        len(request.tokens),
        tools=request.tools or request.grammar is not None,
        turns=request.turn,
    )


def _smooth(old: float, new: float) -> float:
    return new if not old else old + _NEWEST * (new - old)


def _mean(values: Iterable[float], otherwise: float) -> float:
    known = [value for value in values if value]
    return sum(known) / len(known) if known else otherwise
