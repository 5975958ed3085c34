"""The worker's side of the streams that carry prefills; see ``prefill_stream``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from epdserve.services.errors import Draining, Internal, InvalidRequest, ServiceError
from epdserve.services.rpc.convert import error_to_pb, prefill_job_from_pb, prefill_result_to_pb
from epdserve.services.rpc.handlers import PrefillHandler
from epdserve.services.rpc.pb import prefill_pb2
from epdserve.services.rpc.status import shortened
from epdserve.services.types import ErrorInfo

log = logging.getLogger(__name__)

_END_S = 5.0


class PrefillSession:
    """One caller's stream. Lives on the server's event loop.

    Answers that are ready together share a message. The end of the stream cancels what runs: nobody would hear of it.
    """

    def __init__(self, handler: PrefillHandler) -> None:
        self._handler = handler
        self._running: dict[str, asyncio.Task[None]] = {}
        self._answers: list[prefill_pb2.PrefillAnswer] = []
        self._wake = asyncio.Event()
        self._ending = False

    def end(self) -> None:
        """Take no more jobs; the stream ends once those that run have their answers."""
        self._ending = True
        self._wake.set()

    async def serve(
        self,
        messages: AsyncIterator[prefill_pb2.PrefillCalls],
        send: Callable[[prefill_pb2.PrefillAnswers], Awaitable[None]],
    ) -> None:
        """Until the caller goes, or until ``end``."""
        reader = asyncio.create_task(self._read(messages), name="prefill-session-read")
        try:
            while True:
                # cleared before looking: what is set while we send makes us look again
                self._wake.clear()
                if self._answers:
                    answers, self._answers = self._answers, []
                    await send(prefill_pb2.PrefillAnswers(answers=answers))
                elif reader.done() or (self._ending and not self._running):
                    return
                else:
                    await self._wake.wait()
        finally:
            left = [reader, *self._running.values()]
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=_END_S)

    async def _read(self, messages: AsyncIterator[prefill_pb2.PrefillCalls]) -> None:
        try:
            async for message in messages:
                for call in message.calls:
                    self._begin(call)
                for name in message.cancelled:
                    if (task := self._running.get(name)) is not None:
                        task.cancel()
        finally:
            self._wake.set()

    def _begin(self, call: prefill_pb2.PrefillCall) -> None:
        name = call.job.request_id
        if self._ending:
            self._fail(name, Draining("the worker is stopping"))
        elif name in self._running:
            self._fail(name, InvalidRequest(f"request id {name} is in use", param="request_id"))
        else:
            self._running[name] = asyncio.create_task(self._run(call), name="prefill")

    async def _run(self, call: prefill_pb2.PrefillCall) -> None:
        name = call.job.request_id
        try:
            job = prefill_job_from_pb(call.job)
            result = await self._handler.run(job, deadline_s=call.timeout_s)
            answer = prefill_pb2.PrefillAnswer(request_id=name, result=prefill_result_to_pb(result))
            self._answers.append(answer)
        except ServiceError as error:
            self._fail(name, error)
        except Exception as error:
            log.exception("handler failed", extra={"error": type(error).__name__})
            self._fail(name, Internal(f"{type(error).__name__} in the worker"))
        finally:
            del self._running[name]
            self._wake.set()

    def _fail(self, name: str, error: ServiceError) -> None:
        told = error_to_pb(shortened(ErrorInfo.of(error)))
        self._answers.append(prefill_pb2.PrefillAnswer(request_id=name, error=told))
        self._wake.set()
