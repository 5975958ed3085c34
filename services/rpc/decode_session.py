"""The router's side of the stream it shares with one decode worker.

One task keeps the stream open: it connects, introduces itself, asks for every live request from its next offset, and
begins again when the stream breaks. Consumers notice nothing but a pause, unless the worker comes back as another
life of itself or stays away longer than ``lost_after_s``: then their streams end with ``WorkerLost``.

The session reads whatever comes at once and acknowledges it, however slow its consumers are; see ``decode_stream``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from dataclasses import dataclass, replace
from typing import Self

import grpc
from epdserve.services.errors import (
    Cancelled,
    Internal,
    Overloaded,
    ServiceError,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from epdserve.services.rpc.auth import token_metadata
from epdserve.services.rpc.channel import open_channel
from epdserve.services.rpc.decode_stream import DecodeStream
from epdserve.services.rpc.pb import decode_pb2, decode_pb2_grpc
from epdserve.services.rpc.status import error_of
from epdserve.services.rpc.stream_table import StreamTable, gathered
from epdserve.services.types import DecodeJob

log = logging.getLogger(__name__)

StreamCall = grpc.aio.StreamStreamCall[decode_pb2.RouterFrame, decode_pb2.DecodeFrame]


@dataclass(frozen=True, slots=True)
class DecodeSessionLimits:
    """Times and bounds of a session.

    Attributes:
        connect_s: From dialling to the worker's welcome.
        silence_s: A stream without any frame for this long is given up; workers send signs of life.
        lost_after_s: A worker away for this long is lost to the requests it had.
        backoff_min_s: First pause between two attempts to connect; doubles up to ``backoff_max_s``.
        acknowledge_s: Acknowledgements are gathered this long.
        bound_tokens: A consumer more than this behind loses its request.
        requests: Live requests at most.
        close_s: For a farewell that cancels what runs.
    """

    connect_s: float = 5.0
    silence_s: float = 8.0
    lost_after_s: float = 10.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 1.0
    acknowledge_s: float = 0.05
    bound_tokens: int = 8_192
    requests: int = 4_096
    close_s: float = 1.0


class DecodeSession:
    """All requests of this router on one decode worker. Owned by one event loop.

    Args:
        address: ``host:port``, from the registry.
        token: The cluster token.
        router_id: Names this router; the same for all its sessions.
        session: Names this life of the router; the same for all its sessions, and in all of them new after a
            restart. None = a random one.
        worker: Named in errors.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        router_id: str,
        session: str | None = None,
        worker: str | None = None,
        limits: DecodeSessionLimits | None = None,
    ) -> None:
        self.address, self.worker = address, worker
        self.incarnation: str | None = None
        self.reconnects = 0
        self._limits = limits or DecodeSessionLimits()
        self._metadata = token_metadata(token)
        self._hello = decode_pb2.Hello(router_id=router_id, session=session or uuid.uuid4().hex)
        self._table = StreamTable(worker=worker)
        self._connected = self._lost = self._closing = self._takes_many = False
        self._away_since = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin connecting, on the running loop."""
        loop = asyncio.get_running_loop()
        self._away_since = loop.time()
        self._task = loop.create_task(self._run(), name=f"decode-session {self.address}")
        self._task.add_done_callback(self._ran)

    async def close(self) -> None:
        """Cancel what runs, here with ``Cancelled`` and on the worker, and end the stream."""
        self._closing = True
        for stream in self._table:
            self.cancel(stream.request_id)
        self._table.wake.set()
        if self._task is not None:
            if self._connected:
                await asyncio.wait([self._task], timeout=self._limits.close_s)
            self._task.cancel()
            await asyncio.wait([self._task], timeout=5.0)

    @property
    def connected(self) -> bool:
        """Whether the stream stands."""
        return self._connected

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._table)

    def submit(self, job: DecodeJob, *, deadline_s: float) -> DecodeStream:
        """Send a job; returns at once.

        Args:
            job: Its ``request_id`` must be new to this worker.
            deadline_s: From now to the end of the output; past it the request is cancelled, here and by the worker.

        Returns:
            The output. What goes wrong, too much work and a lost worker included, is raised from iterating it.

        Raises:
            ValueError: The request id is live already.
        """
        if self._table.get(job.request_id) is not None:
            raise ValueError(f"request id {job.request_id} is live already")
        stream = DecodeStream(
            job if job.timeout_s is not None else replace(job, timeout_s=deadline_s),
            deadline_at=asyncio.get_running_loop().time() + deadline_s,
            bound_tokens=self._limits.bound_tokens,
            leave=self._table.leave,
        )
        if self._closing:
            stream.fail(Cancelled("the session is closed", worker=self.worker))
        elif self._lost:
            stream.fail(WorkerLost("decode worker is away", worker=self.worker))
        elif len(self._table) >= self._limits.requests:
            message = f"{len(self._table)} requests on one decode worker"
            stream.fail(Overloaded(message, retry_after_s=1.0, worker=self.worker))
        else:
            self._table.add(stream)
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request: its stream with ``Cancelled``, its work on the worker; unknown ids are ignored."""
        stream = self._table.get(request_id)
        if stream is not None:
            self._table.leave(stream)
            stream.fail(Cancelled("cancelled", worker=self.worker))

    async def _run(self) -> None:
        backoff_s = self._limits.backoff_min_s
        loop = asyncio.get_running_loop()
        while not self._closing:
            try:
                await self._one_stream()
            except* (grpc.aio.AioRpcError, ServiceError, TimeoutError) as group:
                self._broke(_first(group, self.worker))
            if self._connected:
                self._connected, self._away_since = False, loop.time()
                backoff_s = self._limits.backoff_min_s
                self.reconnects += 1
            if loop.time() - self._away_since >= self._limits.lost_after_s:
                self._give_up()
            if not self._closing:
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, self._limits.backoff_max_s)

    def _ran(self, task: asyncio.Task[None]) -> None:
        """Nobody may wait for a session that has died of a bug."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("decode session failed", exc_info=error, extra={"worker": self.worker})
            self._lost = True
            self._fail_all(Internal(f"{type(error).__name__} in the decode session", worker=self.worker))

    def _broke(self, error: ServiceError) -> None:
        if isinstance(error, Unauthenticated):
            log.warning("decode worker refuses the cluster token", extra={"worker": self.worker})
            self._fail_all(error)
        elif self._connected and not self._closing:
            fields = {"worker": self.worker, "reason": error.code, "requests": len(self._table)}
            log.info("decode stream broke", extra=fields)

    def _give_up(self) -> None:
        if not self._lost:
            log.warning("decode worker lost", extra={"worker": self.worker, "requests": len(self._table)})
        self._lost = True
        away_s = self._limits.lost_after_s
        self._fail_all(WorkerLost(f"decode worker away for {away_s} s", worker=self.worker))

    async def _one_stream(self) -> None:
        channel = open_channel(self.address)
        try:
            # no deadline on the call, the stream lasts: silence_s and keepalive pings watch over it
            call = decode_pb2_grpc.DecodeStub(channel).Session(None, metadata=self._metadata)
            async with asyncio.timeout(self._connect_s()):
                await _send(call, decode_pb2.RouterFrame(hello=self._hello))
                frame = _frame(await call.read())
            self._welcome(frame)
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(call))
                try:
                    await self._read(call)
                finally:
                    writer.cancel()
        finally:
            async with asyncio.timeout(2.0):
                await channel.close(None)

    def _connect_s(self) -> float:
        """Time for one attempt: none may outlast the moment at which the worker counts as lost."""
        if self._lost:
            return self._limits.connect_s
        left_s = self._away_since + self._limits.lost_after_s - asyncio.get_running_loop().time()
        return max(0.05, min(self._limits.connect_s, left_s))

    def _welcome(self, frame: decode_pb2.DecodeFrame) -> None:
        if frame.WhichOneof("frame") != "welcome":
            raise Internal(f"decode worker began with {frame.WhichOneof('frame')}", worker=self.worker)
        incarnation = frame.welcome.incarnation
        if self.incarnation not in (None, incarnation):
            log.info("decode worker is another", extra={"worker": self.worker, "requests": self.live})
            self._table.restarted()
        self.incarnation = incarnation
        self._takes_many = frame.welcome.takes_many
        self._connected, self._lost = True, False
        self._table.connected()

    async def _read(self, call: StreamCall) -> None:
        loop, silence_s = asyncio.get_running_loop(), self._limits.silence_s
        async with asyncio.timeout(silence_s) as patience:
            while True:
                frame = await call.read()
                patience.reschedule(loop.time() + silence_s)
                self._table.take(_frame(frame))

    async def _write(self, call: StreamCall) -> None:
        loop, table = asyncio.get_running_loop(), self._table
        acknowledge_at = loop.time()
        while True:
            # cleared before looking: what is set while we write makes us look again
            table.wake.clear()
            frames = table.control_frames()
            if table.acks_waiting and loop.time() >= acknowledge_at:
                frames.append(table.ack_frame())
                acknowledge_at = loop.time() + self._limits.acknowledge_s
            for frame in gathered(frames) if self._takes_many else frames:
                await _send(call, frame)
            if self._closing:
                with contextlib.suppress(asyncio.InvalidStateError):  # ended already
                    await call.done_writing()
                return
            timer = loop.call_at(acknowledge_at, table.wake.set) if table.acks_waiting else None
            await table.wake.wait()
            if timer is not None:
                timer.cancel()

    def _fail_all(self, error: ServiceError) -> None:
        for stream in self._table:
            # an error of its own for each: how many tokens were delivered is a field of it
            self._table.end(stream, type(error)(error.message, worker=error.worker))


async def _send(call: StreamCall, frame: decode_pb2.RouterFrame) -> None:
    try:
        await call.write(frame)
    except asyncio.InvalidStateError:
        _frame(await call.read())  # the call has ended; reading tells why


def _frame(read: object) -> decode_pb2.DecodeFrame:
    if not isinstance(read, decode_pb2.DecodeFrame):
        raise Unavailable("decode stream ended")
    return read


def _first(group: BaseExceptionGroup[BaseException], worker: str | None) -> ServiceError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return error_of(error, worker=worker)
    return Unavailable(type(error).__name__, worker=worker)
