"""Token counts and receipts as answers carry them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from epdserve.services.router.request import GenerateRequest, Trail
from epdserve.services.types import TokenSources


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        completion_tokens: Every sampled id: reasoning, markers and EOS too.
        reasoning_tokens: None if the request does not think.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None

    def as_fields(self) -> dict[str, Any]:
        """The ``usage`` object: OpenAI's fields and DeepSeek's; hit + miss = prompt."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
        }
        if self.reasoning_tokens is not None:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return fields


@dataclass(frozen=True, slots=True)
class Totals:
    """What an answer says about itself as a whole.

    Attributes:
        receipt: The ``epdserve`` object, None if not asked for.
    """

    usage: Usage
    receipt: dict[str, Any] | None = None


def receipt_of(request: GenerateRequest, trail: Trail, *, finished_at: float) -> dict[str, Any]:
    """The ``epdserve`` object: where tokens came from, what was recomputed, milliseconds by stage, workers.

    Args:
        finished_at: Time of the last token, by ``now``.
    """
    prefill, decode = trail.prefill, trail.decode
    receipt: dict[str, Any] = {
        "request_id": request.request_id,
        "exact": request.exact,
        "deterministic": request.deterministic,
        "effort": None
        if request.effort is None
        else {
            "asked": (request.effort_asked or request.effort).level,
            "granted": request.effort.level,
        },
        "tokens": {
            "prompt": len(request.tokens),
            **asdict(TokenSources() if prefill is None else prefill.sources),
            "replayed_rows": 0 if prefill is None else prefill.replayed_rows,
            "decode_pages": 0 if decode is None else decode.own_tokens,
            "transferred": 0 if decode is None else decode.pulled_tokens,
            "decode_recomputed": 0 if decode is None else decode.recomputed_tokens,
        },
        "ms": {
            "prepare": _ms(trail.body_at, trail.placed_at),
            "router": round(1000 * (finished_at - trail.received_at - trail.waited_s), 3),
            "workers": round(1000 * trail.waited_s, 3),
            "prefill_queue": 0.0 if prefill is None else round(prefill.queue_ms, 3),
            "prefill": 0.0 if prefill is None else round(prefill.run_ms, 3),
            "decode_queue": 0.0 if decode is None else round(decode.queue_ms, 3),
            "handoff": 0.0 if decode is None else round(decode.handoff_ms, 3),
            "decode": 0.0 if decode is None else round(decode.decode_ms, 3),
            "first_token": _ms(trail.received_at, trail.first_token_at),
            "total": _ms(trail.received_at, finished_at),
        },
        "workers": {
            "prefill": trail.prefill_worker,
            "decode": trail.decode_worker,
            "lost": trail.lost_workers,
        },
        "retries": trail.retries,
        "resumes": trail.resumes,
        "handovers": trail.handovers,
        "preemptions": 0 if decode is None else decode.preemptions,
    }
    return receipt


def _ms(start: float, end: float) -> float:
    return round(1000 * (end - start), 3) if end else 0.0
