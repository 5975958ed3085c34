"""What a worker implements to be called: protobuf and gRPC end here.

Handlers raise ``ServiceError``; the server turns it into a status with details. Everything is called on the
server's event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from epdserve.services.image_types import EmbeddingWish, EncodeJob, EncodeResult, LentEmbeddings
from epdserve.services.store_types import (
    Deleted,
    FetchBatch,
    FetchRequest,
    FoundTail,
    OffloadRequest,
    OffloadResult,
    TailOffer,
    TailQuery,
    TierRun,
)
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


class EncodeHandler(Protocol):
    """Whatever embeds images."""

    async def describe(self) -> WorkerDescription:
        """Facts of the worker and the door to its memory."""
        ...

    async def encode(self, job: EncodeJob) -> EncodeResult:
        """Have all images of a job ready."""
        ...

    async def lend(self, wish: EmbeddingWish, *, deadline_s: float) -> LentEmbeddings:
        """Lend an image's embeddings, once they are there."""
        ...

    async def end_loan(self, lease: str, *, incarnation: str) -> bool:
        """End a lease; whether it still held. A lease of another incarnation never holds."""
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


class StoreHandler(WorkerHandler, Protocol):
    """The store of a machine. Deadlines are the time left to the caller, None if it set no limit."""

    async def offload(
        self, request: OffloadRequest, *, deadline_s: float | None
    ) -> tuple[OffloadResult, ...]:
        """Read blocks out of a worker's pages; what became of each, in order."""
        ...

    async def locate(
        self, hashes: tuple[bytes, ...], *, exact: bool, local_only: bool
    ) -> tuple[TierRun, ...]:
        """How far a chain is held, and where."""
        ...

    def fetch(self, request: FetchRequest, *, deadline_s: float | None) -> AsyncGenerator[FetchBatch, None]:
        """Lend a chain, batch by batch, under one lease.

        The generator is closed (``aclose``) when the caller has gone; the lease ends if that is before its end.
        """
        ...

    async def end_fetch(self, lease: str, *, incarnation: str, suspects: tuple[bytes, ...]) -> bool:
        """End a lease; whether it still held. A lease of another incarnation never holds."""
        ...

    async def offload_tail(self, offer: TailOffer, *, deadline_s: float | None) -> OffloadResult:
        """Read a tail out of a worker's slot."""
        ...

    async def fetch_tail(self, query: TailQuery, *, deadline_s: float | None) -> FoundTail | None:
        """Lend the longest tail that fits the first candidate that has one."""
        ...

    async def touch(self, hashes: tuple[bytes, ...]) -> None:
        """Blocks were used where the store does not see it."""
        ...

    async def delete_tenant(self, tenant: bytes) -> Deleted:
        """Delete for good what is held of a tenant."""
        ...

    async def delete_root(self, root: bytes) -> Deleted:
        """Delete for good what is held of a model."""
        ...
