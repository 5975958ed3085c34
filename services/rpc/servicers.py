"""gRPC servicers over handlers: convert, call, map errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from epdserve.services.errors import Draining, Internal, ServiceError
from epdserve.services.rpc.convert import prefill_job_from_pb, prefill_result_to_pb
from epdserve.services.rpc.convert_worker import description_to_pb, update_to_pb
from epdserve.services.rpc.decode_server import DecodeSessions
from epdserve.services.rpc.handlers import PrefillHandler, WorkerHandler
from epdserve.services.rpc.pb import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from epdserve.services.rpc.prefill_session import PrefillSession
from epdserve.services.rpc.status import status_of
from epdserve.services.types import BlockUpdate

log = logging.getLogger(__name__)

T = TypeVar("T")

Context = grpc.aio.ServicerContext[Any, Any]

# 64k hashes of 16 bytes are 1 MB a message
SNAPSHOT_PART_HASHES = 65_536


async def guarded(context: Context, work: Awaitable[T]) -> T:
    """Await a handler; what it raises ends the call with the status that stands for it."""
    try:
        return await work
    except ServiceError as error:
        await context.abort(*status_of(error))
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        log.exception("handler failed", extra={"error": type(error).__name__})
        await context.abort(*status_of(Internal(f"{type(error).__name__} in the worker")))
    raise AssertionError("abort returned")


class WorkerServicer:
    """What both services have."""

    def __init__(self, handler: WorkerHandler) -> None:
        self._worker = handler
        self._watches: set[asyncio.Task[Any]] = set()
        self._writing: set[asyncio.Task[Any] | None] = set()
        self._ending = False

    def end_watches(self) -> None:
        """Cut the streams of block events off: they would never end by themselves."""
        self._ending = True
        # gRPC refuses a status while a message is on its way: a stream that writes ends itself afterwards
        for task in self._watches - self._writing:
            task.cancel()

    async def Describe(  # noqa: N802 - named by the proto
        self, request: common_pb2.DescribeRequest, context: Context
    ) -> common_pb2.WorkerDescription:
        """Facts of the worker."""
        return description_to_pb(await guarded(context, self._worker.describe()))

    async def WatchBlocks(  # noqa: N802
        self, request: common_pb2.WatchBlocksRequest, context: Context
    ) -> None:
        """Snapshot and deltas of the worker's blocks until the caller goes."""
        task = asyncio.create_task(self._watch(context), name="watch-blocks")
        self._watches.add(task)
        try:
            await guarded(context, _watched(task))
        finally:
            self._watches.discard(task)
            task.cancel()
            await asyncio.wait([task], timeout=5.0)

    async def _watch(self, context: Context) -> None:
        me = asyncio.current_task()
        async with aclosing(_closable(self._worker.watch_blocks())) as updates:
            async for update in updates:
                for part, more in snapshot_parts(update):
                    self._writing.add(me)
                    try:
                        await context.write(update_to_pb(part, more=more))
                    finally:
                        self._writing.discard(me)
                    if self._ending:
                        raise Draining("the worker is stopping")


# gRPC takes a coroutine that writes for a streaming method; the generated types know only generators
class PrefillServicer(WorkerServicer, prefill_pb2_grpc.PrefillServicer):  # type: ignore[misc]
    """The Prefill service over a handler."""

    def __init__(self, handler: PrefillHandler) -> None:
        super().__init__(handler)
        self._handler = handler
        self._sessions: set[PrefillSession] = set()

    def end_watches(self) -> None:
        """As for every worker; sessions end once what runs in them has its answer."""
        super().end_watches()
        for session in self._sessions:
            session.end()

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCalls], context: Context
    ) -> None:
        """Jobs of one caller, as they come."""
        session = PrefillSession(self._handler)
        self._sessions.add(session)
        try:
            await guarded(context, session.serve(request_iterator, context.write))
        finally:
            self._sessions.discard(session)

    async def Run(  # noqa: N802
        self, request: prefill_pb2.PrefillJob, context: Context
    ) -> prefill_pb2.PrefillResult:
        """Fill KV; gRPC cancels this task when the caller goes or its deadline passes."""

        async def run() -> prefill_pb2.PrefillResult:
            job = prefill_job_from_pb(request)
            return prefill_result_to_pb(await self._handler.run(job, deadline_s=context.time_remaining()))

        return await guarded(context, run())

    async def ReleaseLease(  # noqa: N802
        self, request: prefill_pb2.ReleaseLeaseRequest, context: Context
    ) -> prefill_pb2.ReleaseLeaseReply:
        """End a lease."""
        work = self._handler.release_lease(request.lease, incarnation=request.incarnation)
        return prefill_pb2.ReleaseLeaseReply(held=await guarded(context, work))

    async def Abandon(  # noqa: N802
        self, request: prefill_pb2.AbandonRequest, context: Context
    ) -> prefill_pb2.AbandonReply:
        """Undo a job whose caller has given up."""
        await guarded(context, self._handler.abandon(request.request_id))
        return prefill_pb2.AbandonReply()


class DecodeServicer(WorkerServicer, decode_pb2_grpc.DecodeServicer):  # type: ignore[misc]
    """The Decode service: sessions do the work."""

    def __init__(self, handler: WorkerHandler, sessions: DecodeSessions) -> None:
        super().__init__(handler)
        self._sessions = sessions

    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.RouterFrame], context: Context
    ) -> None:
        """One router's stream."""
        await guarded(context, self._sessions.attach(request_iterator, context.write))


def snapshot_parts(update: BlockUpdate) -> list[tuple[BlockUpdate, bool]]:
    """A snapshot in messages of bounded size, each with whether more follow; a delta is one message."""
    if not update.snapshot or len(update.added) <= SNAPSHOT_PART_HASHES:
        return [(update, False)]
    starts = range(0, len(update.added), SNAPSHOT_PART_HASHES)
    return [
        (
            replace(update, added=update.added[at : at + SNAPSHOT_PART_HASHES]),
            at + SNAPSHOT_PART_HASHES < len(update.added),
        )
        for at in starts
    ]


async def _watched(task: asyncio.Task[None]) -> None:
    # awaited from outside: gRPC sends no status for a handler whose own task was cancelled here
    await asyncio.wait([task])
    if task.cancelled():
        raise Draining("the worker is stopping")
    task.result()


async def _closable(updates: AsyncIterator[BlockUpdate]) -> AsyncGenerator[BlockUpdate, None]:
    """The iterator as a generator, so that closing reaches handlers written as one."""
    try:
        async for update in updates:
            yield update
    finally:
        close = getattr(updates, "aclose", None)
        if close is not None:
            await close()
