"""What an error is called in an answer: the official body of spec 6.4, one table from our codes to API types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson
from epdserve.services.errors import InvalidRequest, ModelNotFound, ServiceError

_LONGEST_QUOTE: Final = 64


class ContextTooLong(InvalidRequest):
    """Prompt, or prompt and asked-for answer, do not fit the context."""


class BodyTooSlow(InvalidRequest):
    """The body did not arrive in time."""


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed."""


class NotFound(InvalidRequest):
    """No such path."""


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method does not."""


@dataclass(frozen=True, slots=True)
class Names:
    """What one error is called by the protocols; its gRPC status stands in ``services/errors.py`` beside its code.

    Attributes:
        status: HTTP status, None = that of ``services/errors.py``.
        type, code: OpenAI's and DeepSeek's.
        anthropic: The type in Anthropic's bodies and events.
    """

    type: str
    code: str
    anthropic: str
    status: int | None = None


_SERVER: Final = "server_error"
_INVALID: Final = "invalid_request_error"

# By error code, and by class for errors that only the router knows.
TABLE: Final[dict[str | type[ServiceError], Names]] = {
    "invalid_request": Names(_INVALID, _INVALID, _INVALID),
    "unauthenticated": Names("authentication_error", "invalid_api_key", "authentication_error"),
    "model_not_found": Names(_INVALID, "model_not_found", "not_found_error"),
    "payload_too_large": Names(_INVALID, "request_too_large", "request_too_large"),
    "overloaded": Names("rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    "cancelled": Names("cancelled", "cancelled", "api_error"),
    "internal": Names(_SERVER, "internal_error", "api_error"),
    "unavailable": Names(_SERVER, "service_unavailable", "overloaded_error"),
    "draining": Names(_SERVER, "service_unavailable", "overloaded_error"),
    "worker_lost": Names(_SERVER, "service_unavailable", "overloaded_error"),
    "lease_lost": Names(_SERVER, "service_unavailable", "overloaded_error"),
    "deadline_exceeded": Names(_SERVER, "deadline_exceeded", "timeout_error"),
    ContextTooLong: Names(_INVALID, "context_length_exceeded", _INVALID, 400),
    BodyTooSlow: Names(_INVALID, "request_timeout", "timeout_error", 408),
    UnsupportedEncoding: Names(_INVALID, "unsupported_media_type", _INVALID, 415),
    NotFound: Names(_INVALID, "not_found", "not_found_error", 404),
    MethodNotAllowed: Names(_INVALID, "method_not_allowed", _INVALID, 405),
}


def names_of(error: ServiceError) -> Names:
    """The row of the table for an error; one that has none is a bug of ours, and says no more."""
    return TABLE.get(type(error)) or TABLE.get(error.code) or TABLE["internal"]


def quoted(text: str) -> str:
    """A client's text as an answer may repeat it: printable, on one line, short."""
    return repr(text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "...")


def unknown_model(asked: str, served: Sequence[str]) -> ModelNotFound:
    """The error for a model name that is not served here."""
    known = ", ".join(served)
    return ModelNotFound(f"the model {quoted(asked)} is not served here; served: {known}", param="model")


def status_of(error: ServiceError) -> int:
    """HTTP status of an answer that carries this error."""
    status = names_of(error).status
    return error.http_status if status is None else status


def error_body(error: ServiceError) -> bytes:
    """``{"error": {message, type, param, code}}``."""
    return orjson.dumps({"error": error_fields(error)})


def error_fields(error: ServiceError) -> dict[str, str | None]:
    """The inner object of the official body."""
    names = names_of(error)
    return {"message": error.message, "type": names.type, "param": error.param, "code": names.code}


class ErrorStyle:
    """How a protocol says what went wrong. This one is OpenAI's and DeepSeek's."""

    def body(self, error: ServiceError, request_id: str) -> bytes:
        """The body of an answer."""
        return error_body(error)

    def event(self, error: ServiceError, request_id: str) -> bytes:
        """The end of a stream that has begun."""
        return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"


def error_headers(error: ServiceError) -> list[tuple[bytes, bytes]]:
    """Headers that an answer with this error carries besides its body's."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if status_of(error) == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
