"""The worker's side of the decode streams: jobs in, tokens out, nothing lost, nothing doubled.

This file moves frames; who owns which output, and for how long, is ``decode_desk``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from epdserve.services.errors import InvalidRequest, ServiceError
from epdserve.services.rpc.convert import chunk_to_pb
from epdserve.services.rpc.decode_desk import DecodeDesk, RouterState, SessionCounts, SessionLimits
from epdserve.services.rpc.pb import decode_pb2
from epdserve.services.types import DecodeJob, TokenChunk

log = logging.getLogger(__name__)


class DecodeSessions:
    """All routers' streams of one decode worker.

    Lives on the server's event loop; only ``publish`` may be called from other threads. Request ids are never
    used twice while a worker lives.

    Args:
        worker: Told to routers, and named in errors.
        incarnation: Likewise; a router that sees another one gives its requests up.
        submit: Takes a job over; called on the event loop, must not block. A ``ServiceError`` it raises ends
            the request. Output follows through ``publish``.
        cancel: Ends a request whose output nobody wants any more; must take ids it does not know. Called on
            the event loop, must not block. Nothing needs to be published for the request afterwards.
    """

    def __init__(
        self,
        *,
        worker: str,
        incarnation: str,
        submit: Callable[[DecodeJob], None],
        cancel: Callable[[str], None],
        limits: SessionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker, self._incarnation = worker, incarnation
        self._limits = limits or SessionLimits()
        self._clock = clock
        self._desk = DecodeDesk(worker=worker, submit=submit, cancel=cancel, limits=self._limits, clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def counts(self) -> SessionCounts:
        """What happened so far."""
        return self._desk.counts

    def start(self) -> None:
        """Begin on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._sweeper = self._loop.create_task(self._sweep_regularly(), name="decode-sessions-sweep")

    async def stop(self) -> None:
        """End all streams and cancel what still runs."""
        self._stopping = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper], timeout=5.0)
        for router in self._desk.routers.values():
            self._desk.drop_requests(router)
            router.wake.set()

    async def drained(self, *, deadline_s: float) -> bool:
        """Wait until every request has ended and its end is acknowledged; False if the time was over first."""
        give_up_at = self._clock() + deadline_s
        while any(len(router.outbox) for router in self._desk.routers.values()):
            if self._clock() >= give_up_at:
                return False
            await asyncio.sleep(0.02)
        return True

    def publish(self, chunks: Sequence[TokenChunk]) -> None:
        """Hand over the new tokens of one step; thread-safe, returns at once.

        One call becomes at most one frame a router. Chunks of a request must follow one another without gap
        or overlap, the first at ``len(job.emitted)``; chunks of requests that are no longer wanted are
        dropped.
        """
        assert self._loop is not None, "publish before start"
        self._loop.call_soon_threadsafe(self._desk.publish, chunks)

    def fail_all(self, error: ServiceError) -> None:
        """End every running request with an error its router is told, and ask for its work to be cancelled."""
        for router in self._desk.routers.values():
            for request_id in router.outbox.live():
                self._desk.fail(router, request_id, error)

    def running(self) -> int:
        """Requests whose last chunk has not come."""
        return sum(len(router.outbox.live()) for router in list(self._desk.routers.values()))

    def kept_tokens(self) -> int:
        """Tokens kept for replay, of all routers."""
        return sum(router.outbox.kept_tokens for router in list(self._desk.routers.values()))

    def oldest_unacknowledged_s(self) -> float:
        """Age of the oldest end that its router has not acknowledged, 0 if there is none."""
        routers = list(self._desk.routers.values())
        ends = [end for router in routers if (end := router.outbox.oldest_end()) is not None]
        return max(0.0, self._clock() - min(ends)) if ends else 0.0

    def sweep(self) -> None:
        """Cancel what routers left behind, forget ends nobody acknowledges. Runs regularly once started."""
        self._desk.sweep()

    async def attach(
        self,
        frames: AsyncIterator[decode_pb2.RouterFrame],
        send: Callable[[decode_pb2.DecodeFrame], Awaitable[None]],
    ) -> None:
        """Serve one stream until it breaks, its router opens another, or the worker stops.

        Raises:
            InvalidRequest: The stream does not begin with Hello, or holds a frame that means nothing.
            Overloaded: More requests than one router may have.
        """
        hello = await self._hello(frames)
        router = self._desk.enter(hello.router_id, hello.session)
        generation = router.generation
        try:
            welcome = decode_pb2.Welcome(worker=self._worker, incarnation=self._incarnation, takes_many=True)
            await send(decode_pb2.DecodeFrame(welcome=welcome))
            reader = asyncio.create_task(self._read(router, generation, frames), name="decode-session-read")
            try:
                await self._write(router, generation, send, reader)
            finally:
                reader.cancel()
                await asyncio.wait([reader], timeout=5.0)
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                raise error
        finally:
            self._desk.leave(router, generation)

    async def _hello(self, frames: AsyncIterator[decode_pb2.RouterFrame]) -> decode_pb2.Hello:
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                first = await anext(frames, None)
        except TimeoutError:
            first = None
        if first is None or first.WhichOneof("frame") != "hello" or not first.hello.router_id:
            raise InvalidRequest("a decode stream begins with Hello")
        return first.hello

    async def _read(
        self, router: RouterState, generation: int, frames: AsyncIterator[decode_pb2.RouterFrame]
    ) -> None:
        try:
            async for frame in frames:
                if router.generation != generation:
                    return
                self._desk.handle(router, frame)
        finally:
            router.wake.set()

    async def _write(
        self,
        router: RouterState,
        generation: int,
        send: Callable[[decode_pb2.DecodeFrame], Awaitable[None]],
        reader: asyncio.Task[None],
    ) -> None:
        while True:
            # cleared before looking: what is set while we send makes us look again
            router.wake.clear()
            if self._stopping or router.generation != generation or reader.done():
                return
            while router.unknown:
                request_id = next(iter(router.unknown))
                del router.unknown[request_id]
                await send(decode_pb2.DecodeFrame(unknown=decode_pb2.Unknown(request_id=request_id)))
            chunks = router.outbox.take()
            if not chunks and await self._woken(router.wake):
                continue
            step = decode_pb2.Step(chunks=[chunk_to_pb(chunk) for chunk in chunks])
            self.counts.frames_sent += 1
            self.counts.tokens_sent += sum(len(chunk.tokens) for chunk in chunks)
            await send(decode_pb2.DecodeFrame(step=step))
            # A frame costs its router some hundred microseconds: steps that are faster than that share one. Those of
            # a real model find the gap over.
            await asyncio.sleep(self._limits.gap_s(len(router.outbox)))

    async def _woken(self, wake: asyncio.Event) -> bool:
        """Whether there is something to look at before the next sign of life is due."""
        try:
            async with asyncio.timeout(self._limits.sign_of_life_s):
                await wake.wait()
        except TimeoutError:
            return False
        return True

    async def _sweep_regularly(self) -> None:
        while True:
            await asyncio.sleep(min(self._limits.orphan_grace_s, self._limits.keep_ended_s, 2.0) / 2)
            self.sweep()
