"""Errors of the services, with what they are called on HTTP and on gRPC.

ServiceError
  InvalidRequest     the caller asked for something that cannot be done
  Unauthenticated    key or cluster token missing or wrong
  ModelNotFound      no such model here
  PayloadTooLarge    body over the limit
  Overloaded         a queue is full; retry_after_s says when to come back
  Cancelled          whoever asked has gone, or asked to stop
  Internal           a bug of ours
  Unavailable        nothing here can take the work now
    Draining         this worker takes no new work; another one can
    WorkerLost       a worker died or stayed away; tokens_delivered says how far it came
    LeaseLost        the promise on a peer's pages had ended
  DeadlineExceeded   the time given was over

``code`` is the stable name: it crosses the wire and stands in logs and metrics. The table below is the only
place where codes meet HTTP and gRPC statuses.
"""

# ruff: noqa: N818 - the names are those of the table; "Error" on each would say nothing

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final


class ServiceError(Exception):
    """Base of all; never raised itself.

    Args:
        message: What happened, with the values; never prompts, token ids or keys.
        param: The request field at fault.
        retry_after_s: When the same call may succeed.
        worker: The worker concerned.
        tokens_delivered: Tokens of this request that had reached the consumer.
    """

    code: ClassVar[str] = "internal"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        worker: str | None = None,
        tokens_delivered: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.worker = worker
        self.tokens_delivered = tokens_delivered

    @property
    def http_status(self) -> int:
        """HTTP status of this error."""
        return STATUS[self.code].http_status

    @property
    def grpc_status(self) -> str:
        """Name of the gRPC status of this error."""
        return STATUS[self.code].grpc_status


class InvalidRequest(ServiceError):
    """The caller asked for something that cannot be done; ``param`` names the field."""

    code = "invalid_request"


class Unauthenticated(ServiceError):
    """Key or cluster token missing or wrong."""

    code = "unauthenticated"


class ModelNotFound(ServiceError):
    """No such model here."""

    code = "model_not_found"


class PayloadTooLarge(ServiceError):
    """Body over the limit."""

    code = "payload_too_large"


class Overloaded(ServiceError):
    """A queue is full; ``retry_after_s`` says when to come back."""

    code = "overloaded"


class Cancelled(ServiceError):
    """Whoever asked has gone, or asked to stop."""

    code = "cancelled"


class Internal(ServiceError):
    """A bug of ours."""

    code = "internal"


class Unavailable(ServiceError):
    """Nothing here can take the work now."""

    code = "unavailable"


class Draining(Unavailable):
    """This worker takes no new work; another one can."""

    code = "draining"


class WorkerLost(Unavailable):
    """A worker died or stayed away; ``tokens_delivered`` says how far the request came."""

    code = "worker_lost"


class LeaseLost(Unavailable):
    """The promise on a peer's pages had ended."""

    code = "lease_lost"


class DeadlineExceeded(ServiceError):
    """The time given was over."""

    code = "deadline_exceeded"


@dataclass(frozen=True, slots=True)
class Status:
    """What one error is called on the two wires."""

    error: type[ServiceError]
    http_status: int
    grpc_status: str


STATUS: Final[dict[str, Status]] = {
    row.error.code: row
    for row in (
        Status(InvalidRequest, 400, "INVALID_ARGUMENT"),
        Status(Unauthenticated, 401, "UNAUTHENTICATED"),
        Status(ModelNotFound, 404, "NOT_FOUND"),
        # gRPC knows one status for "too much"; the code in the details tells the two apart
        Status(PayloadTooLarge, 413, "RESOURCE_EXHAUSTED"),
        Status(Overloaded, 429, "RESOURCE_EXHAUSTED"),
        Status(Cancelled, 499, "CANCELLED"),
        Status(Internal, 500, "INTERNAL"),
        Status(Unavailable, 503, "UNAVAILABLE"),
        Status(Draining, 503, "UNAVAILABLE"),
        Status(WorkerLost, 503, "UNAVAILABLE"),
        Status(LeaseLost, 503, "ABORTED"),
        Status(DeadlineExceeded, 504, "DEADLINE_EXCEEDED"),
    )
}
