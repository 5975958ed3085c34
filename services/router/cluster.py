"""The workers as the router sees them. HTTP ends before this file, gRPC starts after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Protocol

from epdserve.services.image_types import EncodeJob, EncodeResult
from epdserve.services.types import DecodeJob, KVHandle, PrefillJob, PrefillResult, TokenChunk, WorkerInfo


class TokenStream(Protocol):
    """Chunks of one request, in order and without gaps; ends after a chunk with a finish reason.

    What goes wrong is raised from iterating it as ``ServiceError``, after all tokens that came before.
    """

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        """Itself."""

    def __anext__(self) -> Awaitable[TokenChunk]:
        """Everything that is ready, waiting for something if nothing is."""

    def aclose(self) -> Awaitable[None]:
        """Leave; a request that has not ended is cancelled at its worker at once."""


class Cluster(Protocol):
    """All workers of all roles. One event loop owns it; not thread-safe.

    Calls name a worker that ``workers`` listed. A worker that has gone since raises ``WorkerLost`` with its name.
    """

    async def start(self) -> None:
        """Connect; returns once the first view of the workers is there or known to be missing."""

    async def close(self) -> None:
        """Close every call and connection."""

    def workers(self) -> Sequence[WorkerInfo]:
        """The workers as last heard of, in any state; an old view is kept when the registry is away."""

    async def drain(self, worker: str, wanted: bool) -> None:
        """Have a worker take no new work, or take it again, for all routers.

        Raises:
            Unavailable: The registry does not answer.
        """

    def hits(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """How many leading blocks of a hash chain each prefill worker and each store holds.

        Those without any may be missing.
        """

    async def prefill(self, worker: str, job: PrefillJob, *, timeout_s: float) -> PrefillResult:
        """Run a prompt. Cancelling the call cancels the job there.

        Raises:
            WorkerLost, Draining, Unavailable: Another worker may do it.
            Overloaded, InvalidRequest, DeadlineExceeded: No other worker would.
        """

    async def encode(self, worker: str, job: EncodeJob, *, timeout_s: float) -> EncodeResult:
        """Have images embedded by a worker that does so. Raises as ``prefill``."""

    def decode(self, worker: str, job: DecodeJob, *, timeout_s: float) -> TokenStream:
        """Tokens of a request; its id must be new to the worker. Broken connections are resumed inside.

        Iterating raises ``WorkerLost`` if the worker did not come back.
        """

    async def release(self, handle: KVHandle, *, timeout_s: float) -> bool:
        """End a lease that nobody will pull; whether it still held."""
