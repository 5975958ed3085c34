"""One request as spans: the whole of it, and the stages that are the router's own."""

from __future__ import annotations

from epdserve.services.errors import ServiceError
from epdserve.services.observability.tracing import Attributes, TracedCall, Tracing
from epdserve.services.router.request import Trail, now


class RequestTrace:
    """Spans of one request; nothing while tracing is off.

    Attributes:
        parent: W3C traceparent that workers are told: of our span, or what the client sent.
    """

    def __init__(self, tracing: Tracing, path: str, trail: Trail, *, given: str) -> None:
        self._tracing, self._trail = tracing, trail
        self._call: TracedCall | None = None
        if tracing.on:
            self._call = tracing.begin(f"POST {path}", parent=given, at=trail.received_at)
        self.parent = given if self._call is None else self._call.traceparent

    def end(self, error: ServiceError | None, *, request_id: str, tenant: str) -> None:
        """The request is over."""
        if self._call is None:
            return
        trail = self._trail
        stages = (
            ("prepare", trail.body_at, trail.placed_at),
            ("until prefilled", trail.placed_at, trail.prefilled_at),
            ("until the first token", trail.prefilled_at, trail.first_token_at),
            ("stream", trail.first_token_at, now()),
        )
        for name, began, ended in stages:
            if began and ended:
                self._tracing.record(name, parent=self.parent, began=began, ended=ended, attributes={})
        told: Attributes = {
            "epdserve.request_id": request_id,
            "epdserve.tenant": tenant,
            "epdserve.prefill_worker": trail.prefill_worker,
            "epdserve.decode_worker": trail.decode_worker,
            "epdserve.cached_tokens": trail.cached_tokens,
            "epdserve.output_tokens": len(trail.drawn),
            "epdserve.retries": trail.retries,
            "epdserve.resumes": trail.resumes,
            "epdserve.handovers": trail.handovers,
        }
        self._call.end(at=now(), attributes=told, error="" if error is None else error.code)
