"""Spans of decode jobs: from their coming to their last chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from epdserve.services.observability.tracing import Tracing
from epdserve.services.types import DecodeJob, TokenChunk


class TracedJobs:
    """Jobs that came with a trace. ``began`` and ``cancelled`` are for the event loop, ``publish`` for the step loop.

    Args:
        publish: Where chunks go.
    """

    def __init__(self, tracing: Tracing, publish: Callable[[Sequence[TokenChunk]], None]) -> None:
        self._tracing, self._publish = tracing, publish
        self._running: dict[str, tuple[str, float]] = {}

    def began(self, job: DecodeJob) -> None:
        """A job has been taken."""
        if self._tracing.on and job.trace:
            self._running[job.request_id] = (job.trace, perf_counter())

    def cancelled(self, request_id: str) -> None:
        """Nobody wants its output any more."""
        self._end(request_id, {"epdserve.outcome": "cancelled"})

    def publish(self, chunks: Sequence[TokenChunk]) -> None:
        """Hand chunks on; a last one ends its job's span."""
        self._publish(chunks)
        if not self._running:
            return
        for chunk in chunks:
            if chunk.final:
                outcome = "ok" if chunk.error is None else chunk.error.code
                self._end(
                    chunk.request_id, {"epdserve.outcome": outcome, "epdserve.output_tokens": chunk.end}
                )

    def _end(self, request_id: str, attributes: dict[str, str | int | float | bool]) -> None:
        if (known := self._running.pop(request_id, None)) is not None:
            trace, began = known
            attributes["epdserve.request_id"] = request_id
            self._tracing.record(
                "decode", parent=trace, began=began, ended=perf_counter(), attributes=attributes
            )
