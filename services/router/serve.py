"""Running what a front end has asked for, and writing it in the front end's shape. No protocol is known here."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from epdserve.services.errors import ServiceError
from epdserve.services.router.choices import ChoiceStreams
from epdserve.services.router.endpoint import Endpoint
from epdserve.services.router.events import Delta, Ending, Message, Parser, cut_by_token
from epdserve.services.router.exchange import Exchange
from epdserve.services.router.feed import Batch, TokenFeed
from epdserve.services.router.foresight import LessEffort
from epdserve.services.router.options import Caller, Options
from epdserve.services.router.request import GenerateRequest, Trail, now
from epdserve.services.router.usage import Totals, Usage, receipt_of
from epdserve.services.types import PrefillResult, TokenChunk

# One newline and no empty line: some clients take an empty line as an empty event (spec case 41)
KEEP_ALIVE: Final = b": keep-alive\n"


class Shape(Protocol):
    """Writes one answer in a protocol's bytes, as a stream or whole. Made once a request."""

    def first(self, so_far: Callable[[], Usage]) -> bytes:
        """Events before the first token; counts are made when they are asked for."""

    def deltas(self, choice: int, deltas: Sequence[Delta], so_far: Callable[[], Usage]) -> bytes:
        """Events of new text."""

    def ended(self, choice: int, ending: Ending, totals: Totals | None) -> bytes:
        """Events of a choice's end; ``totals`` come with the last choice, and with them the end of the stream."""

    def failed(self, error: ServiceError) -> bytes:
        """Events of a failure after the stream began, and its end."""

    def whole(self, messages: Sequence[Message], totals: Totals) -> bytes:
        """The answer in one piece."""

    def prefilled(self, prompt: int, result: PrefillResult) -> None:
        """What the prefill of one prompt has told; comes before anything that needs it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that may run.

    Attributes:
        requests: One a prompt, each with ``options.n`` choices.
        parsers: One a choice: those of the first prompt, then those of the next.
    """

    options: Options
    requests: Sequence[GenerateRequest]
    parsers: Sequence[Parser]
    shape: Shape

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(request.tokens) for request in self.requests)


class GenerationEndpoint(Endpoint):
    """An endpoint that generates: a front end says what, and in which shape."""

    @abstractmethod
    async def ask(self, raw: bytes, caller: Caller) -> Asked:
        """A checked request.

        Raises:
            InvalidRequest, ModelNotFound: As the message says; ``param`` names the field.
        """

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller, trail: Trail) -> None:
        """Prepare, enter, run; where the gate lets it in with less effort only, prepare and run it so."""
        asked = await self.ask(raw, caller)
        try:
            await self._run(exchange, asked, trail)
        except LessEffort:
            await self._run(exchange, await self.ask_less(raw, caller), trail)

    async def ask_less(self, raw: bytes, caller: Caller) -> Asked:
        """The same request at its effort floor. Raises as ``ask``."""
        return await self.ask(raw, caller)

    async def _run(self, exchange: Exchange, asked: Asked, trail: Trail) -> None:
        first = asked.requests[0]
        if first.effort is not None:
            efforts = (
                (b"x-effort-asked", first.effort_asked or first.effort),
                (b"x-effort-granted", first.effort),
            )
            exchange.say(*((name, b"%d" % effort.level) for name, effort in efforts))
            self.parts.present.effort(first.effort_asked or first.effort, first.effort)
        with self.parts.admission.enter(asked.prompt_tokens):
            await Run(self, exchange, asked, trail).serve()


class Run:
    """One request on its way through the pipeline."""

    def __init__(self, endpoint: Endpoint, exchange: Exchange, asked: Asked, trail: Trail) -> None:
        self._parts = endpoint.parts
        self._exchange = exchange
        self._asked = asked
        self._trails = [
            Trail(received_at=trail.received_at, body_at=trail.body_at) for _ in range(len(asked.parsers) - 1)
        ]
        self._trails.insert(0, trail)
        self._open = len(asked.parsers)

    async def serve(self) -> None:
        """Stream it or answer it whole."""
        comes_again = False
        try:
            async with self._feed() as feed:
                if self._asked.options.stream:
                    await self._stream(feed)
                    return
                body = await self._whole(feed)
            await self._exchange.finish_answer(body)
        except LessEffort:
            comes_again = True
            raise
        finally:
            if not comes_again:
                self._record()

    async def _whole(self, feed: TokenFeed) -> bytes:
        """One answer. A client that waits long sees blank lines, whether tokens come or not."""
        messages = [Message() for _ in self._asked.parsers]
        loop, pause_s = asyncio.get_running_loop(), self._parts.config.keep_alive_s
        seen_at = loop.time()
        while self._open:
            news = await self._next(feed)
            if self._parts.config.keep_alive_whole and loop.time() - seen_at >= pause_s:
                await self._exchange.wait_visibly()
                seen_at = loop.time()
            for choice, deltas, ending in news or ():
                messages[choice].add(deltas)
                if ending is not None:
                    messages[choice].ending = ending
        self._tell_prefills()
        return self._asked.shape.whole(messages, self._totals())

    async def _stream(self, feed: TokenFeed) -> None:
        """Events. The status line waits for the first token, so that early failures keep theirs."""
        shape, exchange = self._asked.shape, self._exchange
        exchange.say_failure = shape.failed
        named = False
        while self._open:
            news = await self._next(feed)
            if news is None:
                await self._send(KEEP_ALIVE)
                continue
            events = []
            if not named:
                self._tell_prefills()
                events, named = [shape.first(self._usage)], True
            left = self._open + sum(ending is not None for _, _, ending in news)
            for choice, deltas, ending in news:
                if deltas:
                    events.append(shape.deltas(choice, deltas, self._usage))
                if ending is not None:
                    left -= 1
                    events.append(shape.ended(choice, ending, None if left else self._totals()))
            if written := b"".join(events):
                await self._send(written, last=not self._open)

    async def _next(self, feed: TokenFeed) -> list[tuple[int, list[Delta], Ending | None]] | None:
        """What the tokens that are ready say, choice by choice; None if there were none for a while."""
        loop = asyncio.get_running_loop()
        waiting_since = loop.time()
        batches = await feed.take()
        if batches is None:
            return None
        waited_s = loop.time() - waiting_since
        news: list[tuple[int, list[Delta], Ending | None]] = []
        for batch in batches:
            parser = self._asked.parsers[batch.choice]
            if parser.ending is not None:
                continue  # came after a stop string, before the stream could be left
            if parser.completion_tokens and batch.tokens:
                self._parts.metrics.itl.observe(waited_s)
            deltas = self._parse(parser, batch)
            if parser.ending is not None:
                if batch.finish_reason is None:
                    feed.leave(batch.choice)
            elif batch.finish_reason is not None:
                deltas += parser.finish(batch.finish_reason)
            if parser.ending is not None:
                self._open -= 1
            news.append((batch.choice, deltas, parser.ending))
        return news

    def _parse(self, parser: Parser, batch: Batch) -> list[Delta]:
        """Deltas of a batch; what comes in one push shares an event."""
        size = self._parts.config.tokens_per_event
        if not size or not self._asked.options.stream:
            return parser.push(batch.tokens, batch.logprobs)
        if size == 1 and not batch.logprobs:
            return cut_by_token(parser.push(batch.tokens), batch.tokens, self._parts.tokenizer.vocabulary)
        deltas: list[Delta] = []
        for start in range(0, len(batch.tokens), size):
            some = slice(start, start + size)
            deltas += parser.push(batch.tokens[some], batch.logprobs[some])
        return deltas

    async def _send(self, events: bytes, *, last: bool = False) -> None:
        if not self._exchange.started:
            await self._exchange.start_stream()
        await self._exchange.stream(events, last=last)

    @asynccontextmanager
    async def _feed(self) -> AsyncGenerator[TokenFeed, None]:
        asked, opened = self._asked, []
        try:
            streams: list[AsyncGenerator[TokenChunk, None]] = []
            for number, request in enumerate(asked.requests):
                trails = self._trails[number * request.n : (number + 1) * request.n]
                choices = ChoiceStreams(self._parts.pipeline, request, trails)
                streams += await choices.__aenter__()
                opened.append(choices)
            deadline_at, silence_s = asked.requests[0].deadline_at, self._parts.config.keep_alive_s
            async with TokenFeed(streams, deadline_at=deadline_at, silence_s=silence_s) as feed:
                yield feed
        finally:
            for choices in opened:
                await choices.__aexit__(None, None, None)

    def _tell_prefills(self) -> None:
        for number, request in enumerate(self._asked.requests):
            if (result := self._trails[number * request.n].prefill) is not None:
                self._asked.shape.prefilled(number, result)

    def _usage(self) -> Usage:
        """Counts so far; a prompt counts once, however many choices share it."""
        asked = self._asked
        if len(asked.parsers) == 1:
            (parser,), (trail,) = asked.parsers, self._trails
            return Usage(
                len(asked.requests[0].tokens),
                trail.cached_tokens,
                parser.completion_tokens,
                parser.reasoning_tokens,
            )
        reasoning = [parser.reasoning_tokens for parser in asked.parsers]
        return Usage(
            asked.prompt_tokens,
            sum(trail.cached_tokens for trail in self._trails[:: asked.options.n]),
            sum(parser.completion_tokens for parser in asked.parsers),
            None if all(count is None for count in reasoning) else sum(count or 0 for count in reasoning),
        )

    def _totals(self) -> Totals:
        if not self._asked.options.receipt:
            return Totals(self._usage())
        receipt = receipt_of(self._asked.requests[0], self._trails[0], finished_at=now())
        return Totals(self._usage(), receipt)

    def _record(self) -> None:
        metrics, usage = self._parts.metrics, self._usage()
        first = self._trails[0]
        first.charged_tokens = usage.prompt_tokens + usage.completion_tokens
        metrics.events.inc(self._exchange.writes)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.prompt_size.observe(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens)
        metrics.completion_tokens.inc(usage.completion_tokens)
        metrics.reasoning_tokens.inc(usage.reasoning_tokens or 0)
        request = self._asked.requests[0]
        if request.effort is not None:
            metrics.effort_asked.observe((request.effort_asked or request.effort).level)
            metrics.effort_granted.observe(request.effort.level)
        for trail in self._trails:
            if trail.retries or trail.resumes or trail.handovers:
                metrics.retries.inc(trail.retries)
                metrics.resumes.inc(trail.resumes)
                metrics.handovers.inc(trail.handovers)
        if first.placed_at:
            metrics.prepare.observe(first.placed_at - first.body_at)
        if first.first_token_at:
            metrics.ttft.observe(first.first_token_at - first.received_at)
        if not self._open:
            metrics.e2e.observe(now() - first.received_at)
        self._remember()
        for parser in self._asked.parsers:
            if parser.invalid_calls:
                metrics.invalid_calls.inc(parser.invalid_calls)
            if parser.ending is not None and parser.ending.reason == "stop" and not parser.answered:
                metrics.empty_answers.inc()

    def _remember(self) -> None:
        """Note where prompts came from, and what was drawn for answers that were delivered."""
        metrics, memo = self._parts.metrics, self._parts.memo
        for number, request in enumerate(self._asked.requests):
            choices = slice(number * request.n, (number + 1) * request.n)
            first = self._trails[choices][0]
            if first.prefill is not None:
                metrics.count_sources(first.prefill.sources)
            for trail, parser in zip(self._trails[choices], self._asked.parsers[choices], strict=True):
                if parser.ending is not None:
                    memo.note_soon(request.tenant_key, request.tokens, trail.drawn, metrics.kept)
