"""Several choices of one request: the prompt is prefilled once, each choice decodes and is resumed by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType

from epdserve.services.router.pipeline import Pipeline, Start
from epdserve.services.router.request import GenerateRequest, Trail
from epdserve.services.types import TokenChunk


class ChoiceStreams:
    """The token streams of a request, one a choice. Use as a context; close the streams before it is left.

    Leaving gives back the leases of choices that never came to decode.

    Args:
        trails: One a choice; the first one tells of the common prefill, the others repeat its result.
    """

    def __init__(self, pipeline: Pipeline, request: GenerateRequest, trails: Sequence[Trail]) -> None:
        self._pipeline = pipeline
        self._request = request
        self._trails = trails
        self._starts: asyncio.Task[list[Start]] | None = None
        self._untaken: list[Start] = []

    async def __aenter__(self) -> list[AsyncGenerator[TokenChunk, None]]:
        if self._request.n == 1:
            return [self._pipeline.generate(self._request, self._trails[0])]
        self._starts = asyncio.create_task(self._prefill())
        return [self._stream(index) for index in range(self._request.n)]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._starts is None:
            return
        self._starts.cancel()
        await asyncio.wait([self._starts])
        if not self._starts.cancelled():
            self._starts.exception()  # the streams have told it
        for start in self._untaken:
            await self._pipeline.give_back(start.handle)

    async def _prefill(self) -> list[Start]:
        starts = await self._pipeline.prefill_for_all(self._request, self._trails[0])
        self._untaken = list(starts)
        return starts

    async def _stream(self, index: int) -> AsyncGenerator[TokenChunk, None]:
        assert self._starts is not None
        starts = await asyncio.shield(self._starts)
        trail, first = self._trails[index], self._trails[0]
        if index:
            trail.prefill, trail.placed_at, trail.prefilled_at = (
                first.prefill,
                first.placed_at,
                first.prefilled_at,
            )
            trail.root = first.root
            trail.prefill_worker, trail.decode_worker = first.prefill_worker, first.decode_worker
        start = starts[index] if index < len(starts) else None  # an older worker gives one lease only
        if start is not None:
            self._untaken.remove(start)
        request = replace(
            self._request,
            request_id=f"{self._request.request_id}-c{index}",
            sampling=self._request.sampling.for_choice(index),
            n=1,
        )
        async with aclosing(self._pipeline.generate(request, trail, start)) as chunks:
            async for chunk in chunks:
                yield chunk
