"""One decode job at its worker: chunks without gaps, failures by name, no lease left behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

from epdserve.services.errors import ServiceError, WorkerLost
from epdserve.services.router.attempts import named, remaining_s
from epdserve.services.router.cluster import Cluster, TokenStream
from epdserve.services.router.patience import StallGuard
from epdserve.services.router.request import Trail, now
from epdserve.services.types import DecodeJob, KVHandle, TokenChunk


class Decoding:
    """A context; the task that enters it takes the chunks. Leaving it ends the job, and the lease if no token came.

    Args:
        stall_s: Longest wait for a chunk.
        failed: Told of what the worker has failed with.
        give_back: Ends a lease.
    """

    def __init__(
        self,
        cluster: Cluster,
        worker: str,
        job: DecodeJob,
        trail: Trail,
        *,
        deadline_at: float,
        stall_s: float,
        failed: Callable[[ServiceError, str], None],
        give_back: Callable[[KVHandle], Awaitable[None]],
    ) -> None:
        self._cluster, self._worker, self._job, self._trail = cluster, worker, job, trail
        self._deadline_at, self._stall_s = deadline_at, stall_s
        self._failed, self._give_back = failed, give_back
        self._offset = len(job.emitted)
        self._pulled = False
        self._stream: TokenStream | None = None

    async def __aenter__(self) -> Decoding:
        self._guard = StallGuard(self._stall_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stalled = self._guard.close(error)
        try:
            if self._stream is not None:
                await self._stream.aclose()
        finally:
            if not self._pulled and self._job.handle is not None:
                await self._give_back(self._job.handle)
        if stalled:
            raise WorkerLost(f"no token for {self._stall_s} s", worker=self._worker) from None
        if isinstance(error, ServiceError):
            self._failed(error, self._worker)
            raise named(error, self._worker) from error

    async def next(self) -> TokenChunk:
        """The next chunk; the one with the finish reason is the last.

        Raises:
            ServiceError: The job failed, or its chunks do not follow one another.
        """
        if self._stream is None:
            timeout_s = remaining_s(self._deadline_at)
            self._stream = self._cluster.decode(self._worker, self._job, timeout_s=timeout_s)
        trail = self._trail
        self._guard.begin()
        began_at = now()
        try:
            chunk = await anext(self._stream)
        except StopAsyncIteration:
            raise WorkerLost("the stream ended without a finish reason", worker=self._worker) from None
        finally:
            trail.waited_s += now() - began_at
        self._guard.end()
        if chunk.error is not None:
            raise chunk.error.to_error()
        if chunk.offset != self._offset:
            raise WorkerLost(f"expected output {self._offset}, got {chunk.offset}")
        self._offset = chunk.end
        self._pulled = True
        trail.first_token_at = trail.first_token_at or now()
        trail.decode = chunk.receipt or trail.decode
        return chunk
