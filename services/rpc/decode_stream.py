"""One request's output as its consumer sees it: in order, none twice, bounded.

The session puts tokens in as they come and never waits; the consumer takes out whatever is ready as one chunk. A
consumer that falls more than ``bound_tokens`` behind loses the request, not the session its pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from epdserve.services.errors import Cancelled, DeadlineExceeded, Internal, ServiceError
from epdserve.services.rpc.signal import Signal
from epdserve.services.sampling import TokenLogprob
from epdserve.services.types import DecodeJob, TokenChunk


@dataclass(frozen=True, slots=True)
class Taken:
    """What a stream did with a chunk.

    Attributes:
        gap: The chunk lies ahead of what has come; it must be sent again from ``received``.
        overflow: The consumer is too far behind; the request is to be cancelled.
    """

    gap: bool = False
    overflow: bool = False


class DecodeStream:
    """Async iterator over the chunks of one request. One consumer; owned by the session's event loop.

    Iteration yields chunks without ``error``: an error is raised as ``ServiceError`` with ``tokens_delivered`` set,
    after all tokens that came before it. Leaving early (``aclose``, ``async with``, cancellation of the consumer
    inside ``async with``) cancels the request.
    """

    def __init__(
        self, job: DecodeJob, *, deadline_at: float, bound_tokens: int, leave: Callable[[DecodeStream], None]
    ) -> None:
        self.job = job
        self.received = len(job.emitted)
        self.delivered = len(job.emitted)
        self.submitted = False
        self._deadline_at = deadline_at
        self._bound_tokens = bound_tokens
        self._leave = leave
        self._pending: list[int] = []
        self._logprobs: list[TokenLogprob] = []  # one for each pending token, or none
        self._final: TokenChunk | None = None
        self._error: ServiceError | None = None
        self._over = False  # the consumer has seen the end
        self._ready = Signal()
        self._timer: asyncio.TimerHandle | None = (
            None  # one a stream: one a wait would cost more than the wait
        )

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.job.request_id

    @property
    def ended(self) -> bool:
        """Whether nothing more is expected from the worker."""
        return self._final is not None or self._error is not None

    def take(self, chunk: TokenChunk) -> Taken:
        """Put a chunk in; what has come before is dropped from it."""
        if self.ended:
            return Taken()
        if chunk.offset > self.received:
            return Taken(gap=True)
        new = chunk.tokens[self.received - chunk.offset :]
        if chunk.final and chunk.end < self.received:
            self.fail(Internal(f"output ends at {chunk.end} after {self.received} tokens had come"))
            return Taken()
        self._pending.extend(new)
        self._logprobs.extend(chunk.logprobs[self.received - chunk.offset :])
        self.received += len(new)
        if chunk.error is not None:
            self.fail(chunk.error.to_error())
        elif chunk.finish_reason is not None:
            self._final = chunk
        elif len(self._pending) > self._bound_tokens:
            self.fail(Cancelled(f"the consumer is more than {self._bound_tokens} tokens behind"))
            return Taken(overflow=True)
        if new or self.ended:
            self._ready.set()
        return Taken()

    def fail(self, error: ServiceError) -> None:
        """End the stream; tokens that came before still reach the consumer."""
        if not self.ended:
            self._error = error
            self._ready.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenChunk:
        """Everything that is ready, waiting for it if nothing is.

        Raises:
            ServiceError: How the request failed; ``WorkerLost`` if its worker did.
            DeadlineExceeded: The deadline given with the job has passed; the request is cancelled.
        """
        if self._over:
            raise StopAsyncIteration
        if asyncio.get_running_loop().time() >= self._deadline_at:
            self._expire()
        if not self._ready.is_set():
            await self._wait()
        self._ready.clear()
        tokens, final = tuple(self._pending), self._final
        chunk = TokenChunk(
            self.request_id,
            self.delivered,
            tokens,
            None if final is None else final.finish_reason,
            None,
            None if final is None else final.receipt,
            tuple(self._logprobs),
        )
        self._pending, self._logprobs, self.delivered = [], [], chunk.end
        if final is not None:
            self._end()
        elif self._error is not None:
            if tokens:
                self._ready.set()  # the error comes next
                return chunk
            self._end()
            self._error.tokens_delivered = self.delivered
            raise self._error
        return chunk

    async def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._deadline_at, self._expire)
        await self._ready.wait()

    def _end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._leave(self)
        self.fail(DeadlineExceeded(f"no end of {self.request_id} within its deadline"))

    async def aclose(self) -> None:
        """Leave: cancels the request unless it has ended."""
        self._end()
        self._leave(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
