"""Between the pipeline and a client that reads at its own pace: tokens that are ready together leave together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType

from epdserve.services.errors import DeadlineExceeded, Internal, ServiceError
from epdserve.services.router.patience import Patience
from epdserve.services.rpc.signal import Signal
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import FinishReason, TokenChunk


@dataclass(slots=True)
class Batch:
    """Tokens of one choice that were ready together; the last batch of a choice has its finish reason."""

    choice: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class TokenFeed:
    """Drains the token streams of a request in tasks of its own, so that a slow client never holds a worker back.

    What is buffered is bounded by the choices' ``max_tokens`` ids. Owned by the event loop; use as a context: leaving
    it cancels the streams at once and waits until the cancellation has reached the workers.

    Args:
        streams: One a choice, in the order of the choices.
    """

    def __init__(
        self, streams: Sequence[AsyncGenerator[TokenChunk, None]], *, deadline_at: float, silence_s: float
    ) -> None:
        self._streams = streams
        self._deadline_at = deadline_at
        self._silence_s = silence_s
        self._ready: dict[int, Batch] = {}
        self._error: ServiceError | None = None
        self._news = Signal()
        self._late = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> TokenFeed:
        loop = asyncio.get_running_loop()
        self._patience = Patience(self._silence_s, self._news.set)
        self._timer = loop.call_at(self._deadline_at, self._expire)
        self._tasks = [
            loop.create_task(self._drain(choice, stream)) for choice, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patience.close()
        self._timer.cancel()
        if running := [task for task in self._tasks if not task.done()]:
            for task in running:
                task.cancel()
            await asyncio.wait(running)
        for task in self._tasks:
            if not task.cancelled() and (failure := task.exception()) is not None:
                # Only a bug of ours ends a task with an exception
                raise failure

    def leave(self, choice: int) -> None:
        """End one choice's stream: what is still to come of it changes nothing."""
        self._tasks[choice].cancel()
        self._ready.pop(choice, None)

    async def take(self) -> list[Batch] | None:
        """All tokens that are ready, a batch a choice, waiting for at least one; None after a while of silence.

        Raises:
            ServiceError: A stream failed; what came before it has been taken.
        """
        if not self._news.is_set():
            self._patience.begin()
            await self._news.wait()
            self._patience.end()
        self._news.clear()
        batches, self._ready = self._ready, {}
        if self._error is not None:
            if not batches:
                raise self._error
            self._news.set()
        return list(batches.values()) or None

    async def _drain(self, choice: int, stream: AsyncGenerator[TokenChunk, None]) -> None:
        ended = False
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    batch = self._ready.get(choice)
                    if batch is None:
                        batch = self._ready[choice] = Batch(choice)
                    batch.tokens.extend(chunk.tokens)
                    batch.logprobs.extend(chunk.logprobs)
                    batch.finish_reason = chunk.finish_reason
                    ended = chunk.finish_reason is not None
                    self._news.set()
        except ServiceError as error:
            self._fail(error)
        except asyncio.CancelledError:
            if not self._late:
                raise  # not wanted any more: no news
            self._fail(DeadlineExceeded("the deadline of the request passed"))
        except BaseException:
            # A bug: nobody must wait for ever; leaving the context tells which
            self._fail(Internal("the token stream broke off"))
            raise
        else:
            if not ended:
                self._fail(Internal("the token stream broke off"))

    def _expire(self) -> None:
        self._late = True
        for task in self._tasks:
            task.cancel()

    def _fail(self, error: ServiceError) -> None:
        self._error = self._error or error
        self._news.set()
