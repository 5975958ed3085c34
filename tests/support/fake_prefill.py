"""A prefill worker without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from epdserve.services.types import (
    BlockUpdate,
    KVHandle,
    PrefillJob,
    PrefillResult,
    TailRef,
    TransferEndpoint,
    TransferRegion,
    WorkerDescription,
    WorkerRole,
    token_ids,
)
from support.fake_decode import worker_info

JOB = PrefillJob("a", token_ids(range(1000)), b"key", exact=True)
RESULT = PrefillResult(KVHandle("w", "1", "lease", (), TailRef(1, 2, 3, 4, True), 1000), 0, 0, 1000, 0.5, 1.5)


class FakePrefill:
    """Answers with ``RESULT``, an error, or never."""

    def __init__(self) -> None:
        self.jobs: list[PrefillJob] = []
        self.deadlines: list[float | None] = []
        self.abandoned: list[str] = []
        self.cancelled = 0
        self.error: Exception | None = None
        self.hang = False

    async def run(self, job: PrefillJob, *, deadline_s: float | None) -> PrefillResult:
        self.jobs.append(job)
        self.deadlines.append(deadline_s)
        if self.error is not None:
            raise self.error
        if self.hang:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return RESULT

    async def release_lease(self, lease: str, *, incarnation: str) -> bool:
        return (lease, incarnation) == ("lease", "1")

    async def abandon(self, request_id: str) -> None:
        self.abandoned.append(request_id)

    async def describe(self) -> WorkerDescription:
        endpoint = TransferEndpoint("agent", b"\x00\xff", (TransferRegion("pages", 1, 2, 3, -1),))
        return WorkerDescription(worker_info("w", role=WorkerRole.PREFILL), endpoint)

    async def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        yield BlockUpdate("1", True, 0, 0, (), ())
