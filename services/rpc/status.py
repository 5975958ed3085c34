"""``ServiceError`` to gRPC status and back.

The details ride in trailing metadata under ``epdserve-error-bin`` as an ``ErrorDetail``, cut to a bounded
length: a peer's metadata limit must not turn a clear error into an unclear one. Without details (the peer
never answered, or something between us did) the status alone decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import grpc
from epdserve.services.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    LeaseLost,
    Overloaded,
    ServiceError,
    Unauthenticated,
    WorkerLost,
)
from epdserve.services.rpc.convert import error_from_pb, error_to_pb
from epdserve.services.rpc.pb import common_pb2
from epdserve.services.types import ErrorInfo
from google.protobuf.message import DecodeError

DETAIL_KEY: Final = "epdserve-error-bin"
MAX_MESSAGE_CHARS: Final = 1000  # of a message in details; gRPC's own metadata limit is 8 KiB

_BY_STATUS: Final[dict[grpc.StatusCode, type[ServiceError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    # a worker of ours that refuses says so in details: these come from a connection that broke, or never was.
    # (Whoever cancels a call here sees CancelledError instead.)
    grpc.StatusCode.CANCELLED: WorkerLost,
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.UNKNOWN: WorkerLost,
    grpc.StatusCode.ABORTED: LeaseLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def status_of(error: ServiceError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Status, short text and trailing metadata that tell an error to a client."""
    info = shortened(ErrorInfo.of(error))
    # the text is for people with other tools; percent-encoding triples it at worst
    text = _cut(info.message, 200)
    return grpc.StatusCode[error.grpc_status], text, ((DETAIL_KEY, error_to_pb(info).SerializeToString()),)


def shortened(info: ErrorInfo) -> ErrorInfo:
    """The error with texts of bounded length."""
    return replace(
        info,
        message=_cut(info.message, MAX_MESSAGE_CHARS),
        param=None if info.param is None else _cut(info.param, 200),
        worker=None if info.worker is None else _cut(info.worker, 200),
    )


def error_of(error: grpc.aio.AioRpcError, *, worker: str | None = None) -> ServiceError:
    """The error a failed call stands for.

    Args:
        error: What the call raised.
        worker: Named in the error if its details name none.
    """
    found = error_from_details(error.trailing_metadata())
    if found is not None:
        found.worker = found.worker or worker
        return found
    kind = _BY_STATUS.get(error.code(), Internal)
    text = _cut(error.details() or "no details", MAX_MESSAGE_CHARS)
    return kind(f"{error.code().name}: {text}", worker=worker)


def error_from_details(metadata: Iterable[Any] | None) -> ServiceError | None:
    """The error told in trailing metadata, None if there is none that can be read."""
    for key, value in metadata or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return error_from_pb(common_pb2.ErrorDetail.FromString(value)).to_error()
            except DecodeError:
                return None
    return None


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 3] + "..."
