"""Between the pipeline and a client that reads at its own pace: tokens that are ready together leave together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from epdserve.services.errors import DeadlineExceeded, Internal, ServiceError
from epdserve.services.router.patience import Patience
from epdserve.services.types import FinishReason, TokenChunk


class TokenFeed:
    """Drains a token stream in a task of its own, so that a slow client never holds a worker's stream back.

    What is buffered is bounded by the request's ``max_tokens`` ids. Owned by the event loop; use as a context:
    leaving it cancels the stream at once and waits until the cancellation has reached the workers.

    Attributes:
        finish_reason: Set once the stream has ended well and all of it has been taken.
    """

    def __init__(
        self, chunks: AsyncGenerator[TokenChunk, None], *, deadline_at: float, silence_s: float
    ) -> None:
        self._chunks = chunks
        self._deadline_at = deadline_at
        self._silence_s = silence_s
        self._ready: list[int] = []
        self._ended: FinishReason | None = None
        self._error: ServiceError | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.finish_reason: FinishReason | None = None

    async def __aenter__(self) -> TokenFeed:
        self._patience = Patience(self._silence_s, self._news.set)
        self._task = asyncio.create_task(self._drain())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._patience.close()
        if not self._task.done():
            self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and (failure := self._task.exception()) is not None:
            # Only a bug of ours ends the task with an exception
            raise failure

    async def take(self) -> list[int] | None:
        """All tokens that are ready, waiting for at least one or for the end; None after a while of silence.

        The last batch, maybe empty, comes with ``finish_reason`` set.

        Raises:
            ServiceError: The stream failed; what came before it has been taken.
        """
        if not self._news.is_set():
            self._patience.begin()
            await self._news.wait()
            self._patience.end()
        self._news.clear()
        tokens, self._ready = self._ready, []
        if tokens and self._error is not None:
            self._news.set()
            return tokens
        if self._error is not None:
            raise self._error
        self.finish_reason = self._ended
        return tokens if tokens or self._ended is not None else None

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout_at(self._deadline_at), aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    self._ready.extend(chunk.tokens)
                    self._ended = chunk.finish_reason
                    self._news.set()
        except TimeoutError:
            self._error = DeadlineExceeded("the deadline of the request passed")
        except ServiceError as error:
            self._error = error
        finally:
            if self._ended is None and self._error is None:
                # A bug: nobody must wait for ever; leaving the context tells which
                self._error = Internal("the token stream broke off")
            self._news.set()
