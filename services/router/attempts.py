"""Small questions of one attempt at a request: its id, its tokens, its time, and what its failures are called."""

from __future__ import annotations

import asyncio

import numpy as np
from epdserve.services.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    ServiceError,
    Unauthenticated,
    Unavailable,
)
from epdserve.services.router.request import GenerateRequest, Trail
from epdserve.services.types import TokenIds, token_ids


def prefilled_tokens(request: GenerateRequest, emitted: list[int]) -> TokenIds:
    """What a prefill covers: after a death the delivered tokens too, unless decoding must run them again."""
    if not emitted or request.deterministic:
        return request.tokens
    return token_ids(np.concatenate([request.tokens, np.array(emitted, dtype="<i4")]))


def attempt_id(request: GenerateRequest, trail: Trail) -> str:
    """Workers take every id once in their lives, and a request may come to one twice."""
    return f"{request.request_id}.{trail.retries + trail.resumes + trail.handovers}"


def heed_cancellation() -> None:
    """A call that fails as it is cancelled tells its failure; whoever cancelled must not get a retry for it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def remaining_s(deadline_at: float) -> float:
    """Until a moment of the loop's clock.

    Raises:
        DeadlineExceeded: It has passed.
    """
    remaining_s = deadline_at - asyncio.get_running_loop().time()
    if remaining_s <= 0:
        raise DeadlineExceeded("the deadline of the request passed")
    return remaining_s


def named(error: ServiceError, worker: str) -> ServiceError:
    """The error as the client may hear it, with the worker that sent it unless it names another one itself."""
    name = error.worker or worker
    if isinstance(error, Cancelled):
        # Not our doing, or it would not be heard here: the worker wants to be rid of the request
        return Unavailable(f"{name} gave the request up", worker=name)
    if isinstance(error, (Internal, Unauthenticated)):
        # What went wrong between us and a worker is a matter of logs
        return Internal(f"{name} failed", worker=name)
    error.worker = name
    return error
