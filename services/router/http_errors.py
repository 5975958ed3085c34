"""What an error is called in an answer: the official body of spec 6.4, one table from our codes to API types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson
from epdserve.services.errors import InvalidRequest, ModelNotFound, ServiceError

_LONGEST_QUOTE: Final = 64


@dataclass(frozen=True, slots=True)
class _Names:
    type: str
    code: str


_NAMES: Final[dict[str, _Names]] = {
    "invalid_request": _Names("invalid_request_error", "invalid_request_error"),
    "unauthenticated": _Names("authentication_error", "invalid_api_key"),
    "model_not_found": _Names("invalid_request_error", "model_not_found"),
    "payload_too_large": _Names("invalid_request_error", "request_too_large"),
    "overloaded": _Names("rate_limit_error", "rate_limit_exceeded"),
    "cancelled": _Names("cancelled", "cancelled"),
    "internal": _Names("server_error", "internal_error"),
    "unavailable": _Names("server_error", "service_unavailable"),
    "draining": _Names("server_error", "service_unavailable"),
    "worker_lost": _Names("server_error", "service_unavailable"),
    "lease_lost": _Names("server_error", "service_unavailable"),
    "deadline_exceeded": _Names("server_error", "deadline_exceeded"),
}


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


_STATUS_OF_KIND: Final[dict[type[ServiceError], tuple[int, str]]] = {
    ContextTooLong: (400, "context_length_exceeded"),
    BodyTooSlow: (408, "request_timeout"),
    UnsupportedEncoding: (415, "unsupported_media_type"),
    NotFound: (404, "not_found"),
    MethodNotAllowed: (405, "method_not_allowed"),
}


def quoted(text: str) -> str:
    """A client's text as an answer may repeat it: printable, on one line, short."""
    return repr(text if len(text) <= _LONGEST_QUOTE else text[:_LONGEST_QUOTE] + "...")


def unknown_model(asked: str, served: Sequence[str]) -> ModelNotFound:
    """The error for a model name that is not served here."""
    known = ", ".join(served)
    return ModelNotFound(f"the model {quoted(asked)} is not served here; served: {known}", param="model")


def status_of(error: ServiceError) -> int:
    """HTTP status of an answer that carries this error."""
    known = _STATUS_OF_KIND.get(type(error))
    return known[0] if known else error.http_status


def error_body(error: ServiceError) -> bytes:
    """``{"error": {message, type, param, code}}``."""
    names = _NAMES.get(error.code, _NAMES["internal"])
    known = _STATUS_OF_KIND.get(type(error))
    fields = {
        "message": error.message,
        "type": names.type,
        "param": error.param,
        "code": known[1] if known else names.code,
    }
    return orjson.dumps({"error": fields})


def error_headers(error: ServiceError) -> list[tuple[bytes, bytes]]:
    """Headers that an answer with this error carries besides its body's."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(error.retry_after_s))).encode()))
    if status_of(error) == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
