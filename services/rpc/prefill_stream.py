"""The client's side of the stream that carries one client's prefills: what is ready together shares a message.

A unary call a prompt costs both sides several times what a message on an open stream does. The stream opens with the
first job and again after it broke; a break is a lost worker to whatever waits then, as it is to unary calls, so nothing
has to be resumed. A worker of a version without it answers UNIMPLEMENTED and is called job by job from then on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final

import grpc
from epdserve.services.errors import DeadlineExceeded, ServiceError, WorkerLost
from epdserve.services.rpc.convert import error_from_pb, prefill_job_to_pb, prefill_result_from_pb
from epdserve.services.rpc.pb import prefill_pb2, prefill_pb2_grpc
from epdserve.services.rpc.status import error_of
from epdserve.services.types import PrefillJob, PrefillResult

# Of one message; a longer prompt has one of its own
_MESSAGE_BYTES: Final = 2**20
_CLOSE_S: Final = 2.0

StreamCall = grpc.aio.StreamStreamCall[prefill_pb2.PrefillCalls, prefill_pb2.PrefillAnswers]


class NotServedError(Exception):
    """The worker knows no such stream; jobs are to be sent one by one."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One job, from its sending to its answer."""

    job: PrefillJob
    timeout_s: float
    answer: asyncio.Future[prefill_pb2.PrefillResult]
    timer: asyncio.TimerHandle | None = None


class PrefillStream:
    """Prefills of one client at one worker. Owned by one event loop.

    Args:
        worker: Named in errors.
    """

    def __init__(
        self,
        stub: prefill_pb2_grpc.PrefillAsyncStub,
        metadata: tuple[tuple[str, str], ...],
        *,
        worker: str | None,
    ) -> None:
        self._stub, self._metadata, self._worker = stub, metadata, worker
        self._waiting: dict[str, _Waiting] = {}  # bounded by the requests inside this process
        self._unsent: deque[_Waiting] = deque()
        self._cancelled: list[str] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    async def run(self, job: PrefillJob, *, deadline_s: float) -> PrefillResult:
        """Fill KV for a prompt. Cancelling this coroutine cancels the job on the worker.

        Raises:
            ServiceError: What the worker raised; ``WorkerLost`` if it cannot be reached; ``DeadlineExceeded``.
            NotServedError: The worker has no such stream.
            ValueError: The request id is at the worker already.
        """
        if job.request_id in self._waiting:
            raise ValueError(f"request id {job.request_id} is live already")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(job, deadline_s, loop.create_future())
        self._waiting[job.request_id] = waiting
        self._unsent.append(waiting)
        waiting.timer = loop.call_later(deadline_s, self._expire, waiting)
        self._wake.set()
        if self._task is None:
            self._task = loop.create_task(self._serve(), name="prefill-stream")
        try:
            return prefill_result_from_pb(await waiting.answer)
        except asyncio.CancelledError:
            self._cancel(waiting)
            raise
        finally:
            waiting.timer.cancel()
            self._waiting.pop(job.request_id, None)

    async def close(self) -> None:
        """End the stream, and with it what runs. Said to the worker, so that nothing of the call is left for later."""
        if (task := self._task) is not None:
            self._closing = True
            self._wake.set()
            await asyncio.wait([task], timeout=_CLOSE_S)
            task.cancel()
            await asyncio.wait([task], timeout=_CLOSE_S)

    def _expire(self, waiting: _Waiting) -> None:
        if not waiting.answer.done():
            late = DeadlineExceeded(f"no prefill within {waiting.timeout_s} s", worker=self._worker)
            waiting.answer.set_exception(late)
            self._cancel(waiting)

    def _cancel(self, waiting: _Waiting) -> None:
        if waiting in self._unsent:
            self._unsent.remove(waiting)
        elif self._task is not None:
            self._cancelled.append(waiting.job.request_id)
            self._wake.set()

    async def _serve(self) -> None:
        """One stream, from its opening until it breaks; whatever waits then fails with it."""
        failure: Exception = WorkerLost("the client is closed", worker=self._worker)
        try:
            # no deadline on the call, the stream lasts: keepalive pings watch over it, and each job has its own limit
            call = self._stub.Session(None, metadata=self._metadata)
            writer = asyncio.create_task(self._write(call), name="prefill-stream-write")
            try:
                failure = await self._read(call)
            finally:
                writer.cancel()
                call.cancel()
                await asyncio.wait([writer], timeout=_CLOSE_S)
        finally:
            self._task = None
            self._cancelled.clear()
            self._unsent.clear()
            for waiting in self._waiting.values():
                if not waiting.answer.done():
                    # an error of its own for each: whoever catches it writes into it
                    waiting.answer.set_exception(_copy(failure))

    async def _read(self, call: StreamCall) -> Exception:
        """Give answers out until the stream ends; why it did."""
        try:
            async for answers in call:
                for answer in answers.answers:
                    self._take(answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return NotServedError()
            return error_of(error, worker=self._worker)
        return WorkerLost("the prefill stream ended", worker=self._worker)

    def _take(self, answer: prefill_pb2.PrefillAnswer) -> None:
        waiting = self._waiting.get(answer.request_id)
        if waiting is None or waiting.answer.done():
            return  # nobody waits any more; the worker has heard it
        if answer.HasField("error"):
            error = error_from_pb(answer.error).to_error()
            error.worker = error.worker or self._worker
            waiting.answer.set_exception(error)
        else:
            waiting.answer.set_result(answer.result)

    async def _write(self, call: StreamCall) -> None:
        while True:
            # cleared before looking: what is set while we write makes us look again
            self._wake.clear()
            try:
                if self._closing:
                    await call.done_writing()
                    return
                if self._unsent or self._cancelled:
                    await call.write(self._message())
                else:
                    await self._wake.wait()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the call has ended; the reader tells why

    def _message(self) -> prefill_pb2.PrefillCalls:
        """Everything that is to be said, up to the size of a message."""
        message = prefill_pb2.PrefillCalls(cancelled=self._cancelled)
        self._cancelled.clear()
        nbytes = 0
        while self._unsent and nbytes < _MESSAGE_BYTES:
            waiting = self._unsent.popleft()
            nbytes += waiting.job.tokens.nbytes
            message.calls.add(job=prefill_job_to_pb(waiting.job), timeout_s=waiting.timeout_s)
        return message


def _copy(failure: Exception) -> Exception:
    if isinstance(failure, ServiceError):
        return type(failure)(failure.message, worker=failure.worker)
    return failure
