"""What a worker implements to be called: protobuf and gRPC end here.

Handlers raise ``ServiceError``; the server turns it into a status with details. Everything is called on the
server's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from epdserve.services.types import BlockUpdate, PrefillJob, PrefillResult, WorkerDescription


class WorkerHandler(Protocol):
    """What every worker answers."""

    async def describe(self) -> WorkerDescription:
        """Facts of the worker and the door to its memory."""
        ...

    def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        """A snapshot of the blocks held, then what changes, for as long as the caller listens.

        The iterator is closed (``aclose``) when the caller has gone.
        """
        ...


class PrefillHandler(WorkerHandler, Protocol):
    """A prefill worker."""

    async def run(self, job: PrefillJob, *, deadline_s: float | None) -> PrefillResult:
        """Fill KV for a prompt.

        Args:
            job: The work.
            deadline_s: Time left to the caller; None if it set no limit. The task is cancelled when the
                caller goes away or the time is over.
        """
        ...

    async def release_lease(self, lease: str, *, incarnation: str) -> bool:
        """End a lease; whether it still held. A lease of another incarnation never holds."""
        ...

    async def abandon(self, request_id: str) -> None:
        """Cancel a job, or end the lease it was given: its caller has given up. An unknown job is none."""
        ...
