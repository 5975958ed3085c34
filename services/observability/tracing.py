"""Traces across processes with OpenTelemetry; off unless the environment says where they go.

``EPDSERVE_TRACES=http://127.0.0.1:4318`` posts them in OTLP's JSON form, ``EPDSERVE_TRACES=file:/folder`` appends
them, a line a batch, to a file of each process that a collector's OTLP JSON file receiver reads. How many are taken
is told by OpenTelemetry's own ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``. Spans are recorded when what
they tell of is over, so that nothing is done for them while tokens are made; no prompt and no key is in one.
"""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from epdserve.services.errors import InvalidRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

VARIABLE: Final = "EPDSERVE_TRACES"
_POST_S: Final = 5.0
_NS: Final = 1_000_000_000

Attributes: TypeAlias = Mapping[str, str | int | float | bool]


class Tracing:
    """Spans of one process; does nothing without an exporter. Thread-safe.

    Times are those of ``time.perf_counter``, in seconds.

    Args:
        service: As collectors group by: ``epdserve-router`` and the like.
        instance: Of the process.
        exporter: None = off.
    """

    def __init__(self, service: str, instance: str, exporter: SpanExporter | None = None) -> None:
        self._provider: Any = None
        if exporter is None:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = self._provider.get_tracer("epdserve")
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    @property
    def on(self) -> bool:
        """Whether anything is recorded."""
        return self._provider is not None

    def begin(self, name: str, *, parent: str, at: float) -> TracedCall | None:
        """A span that is open; None while off.

        Args:
            parent: W3C traceparent, empty if none.
        """
        if self._provider is None:
            return None
        span = self._tracer.start_span(name, context=_context(parent), start_time=self._ns(at))
        return TracedCall(self, span)

    def record(self, name: str, *, parent: str, began: float, ended: float, attributes: Attributes) -> None:
        """A span of something that is over. Ignored while off, and without a parent."""
        if self._provider is None or not parent:
            return
        span = self._tracer.start_span(name, context=_context(parent), start_time=self._ns(began))
        span.set_attributes(attributes)
        span.end(self._ns(ended))

    def close(self) -> None:
        """Send what waits; takes seconds where the collector is away."""
        if self._provider is not None:
            self._provider.shutdown()

    def _ns(self, at: float) -> int:
        return self._epoch_ns + int(at * _NS)


UNTRACED: Final = Tracing("", "")


class TracedCall:
    """An open span, and its name for those who are called."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span

    @property
    def traceparent(self) -> str:
        """W3C traceparent of this span."""
        told = self._span.get_span_context()
        return f"00-{told.trace_id:032x}-{told.span_id:016x}-{told.trace_flags:02x}"

    def end(self, *, at: float, attributes: Attributes, error: str = "") -> None:
        """Close it; ``error`` is the name of what went wrong."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(attributes)
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(self._tracing._ns(at))


def tracing_from_environment(service: str, instance: str, environ: Mapping[str, str] = os.environ) -> Tracing:
    """As the environment says.

    Raises:
        InvalidRequest: It names neither a folder nor an HTTP address, or the package is missing.
    """
    where = environ.get(VARIABLE, "")
    if not where:
        return Tracing(service, instance)
    try:
        if where.startswith("file:"):
            return Tracing(service, instance, file_exporter(Path(where.removeprefix("file:")), instance))
        if where.startswith(("http://", "https://")):
            return Tracing(service, instance, http_exporter(where))
    except ImportError:
        raise InvalidRequest(f"{VARIABLE} needs the package opentelemetry-sdk", param=VARIABLE) from None
    raise InvalidRequest(f"{VARIABLE} is neither file:/FOLDER nor an HTTP address", param=VARIABLE)


def file_exporter(folder: Path, instance: str) -> SpanExporter:
    """Appends to ``folder/traces-INSTANCE-PID.jsonl``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"traces-{instance}-{os.getpid()}.jsonl"

    def write(batch: bytes) -> None:
        with path.open("ab") as file:
            file.write(batch + b"\n")

    return _exporter(write)


def http_exporter(address: str) -> SpanExporter:
    """Posts to ``address/v1/traces``, or to the address itself where it has that path already."""
    url = address if address.endswith("/v1/traces") else address.rstrip("/") + "/v1/traces"

    def post(batch: bytes) -> None:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url, data=batch, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=_POST_S):
            pass

    return _exporter(post)


def _exporter(write: Any) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class JsonExporter(SpanExporter):
        """A batch becomes one object of OTLP's JSON form; what cannot be delivered is dropped and said once."""

        failed = False

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                write(json.dumps(otlp_json(spans), separators=(",", ":")).encode())
            except (OSError, urllib.error.URLError) as error:
                if not self.failed:
                    log.warning("traces are lost", extra={"reason": type(error).__name__})
                self.failed = True
                return SpanExportResult.FAILURE
            self.failed = False
            return SpanExportResult.SUCCESS

    return JsonExporter()


def otlp_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Spans of one process in OTLP's JSON form (ids in hex, times as decimal strings)."""
    resource = _attributes(dict(spans[0].resource.attributes)) if spans else []
    scope = {"scope": {"name": "epdserve"}, "spans": [_span(span) for span in spans]}
    return {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [scope]}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None, "a span that ended has a context"
    told: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(dict(span.attributes or {})),
    }
    if span.parent is not None:
        told["parentSpanId"] = f"{span.parent.span_id:016x}"
    if not span.status.is_unset:
        told["status"] = {"code": span.status.status_code.value, "message": span.status.description or ""}
    return told


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in sorted(values.items())]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


def _context(parent: str) -> Context | None:
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})
