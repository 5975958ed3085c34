"""``chat/completions``: one HTTP exchange from the first byte in to the last byte out."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from epdserve.services.errors import DeadlineExceeded
from epdserve.services.router.chat_request import Caller, ChatCall, prepare_chat
from epdserve.services.router.endpoint import Endpoint
from epdserve.services.router.exchange import Exchange
from epdserve.services.router.feed import TokenFeed
from epdserve.services.router.parsing import Delta, OutputParser
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.request import Trail
from epdserve.services.router.shapes import (
    KEEP_ALIVE,
    AnswerHead,
    AnswerWriter,
    ChunkWriter,
    Dialect,
)
from epdserve.services.router.usage import Usage, receipt_of


class ChatEndpoint(Endpoint):
    """Chat completions in one dialect."""

    def __init__(self, parts: RouterParts, dialect: Dialect) -> None:
        super().__init__(parts)
        self._dialect = dialect

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller, trail: Trail) -> None:
        """Prepare, enter, run."""
        call = await prepare_chat(raw, self.parts, caller)
        with self.parts.admission.enter(len(call.request.tokens)):
            await self._run(exchange, call, trail)

    async def _run(self, exchange: Exchange, call: ChatCall, trail: Trail) -> None:
        parser = OutputParser(call.chat, self.parts.tokenizer, call.request.sampling.stop_token_ids)
        head = AnswerHead("chatcmpl-" + call.request.request_id, call.body.model, int(time.time()))
        try:
            if call.body.stream:
                await self._stream(exchange, call, trail, parser, head)
            else:
                await self._whole(exchange, call, trail, parser, head)
        finally:
            self._record(exchange, call, trail, parser)

    async def _whole(
        self, exchange: Exchange, call: ChatCall, trail: Trail, parser: OutputParser, head: AnswerHead
    ) -> None:
        """One JSON answer."""
        writer = AnswerWriter(head, self._dialect, thinking=call.chat.effort is not None)
        chunks = self.parts.pipeline.generate(call.request, trail)
        try:
            async with asyncio.timeout_at(call.request.deadline_at), aclosing(chunks):
                async for chunk in chunks:
                    writer.add(parser.push(chunk.tokens))
                    if chunk.finish_reason is not None:
                        writer.add(parser.finish(chunk.finish_reason))
                    if parser.finished:
                        break
        except TimeoutError:
            raise DeadlineExceeded("the deadline of the request passed") from None
        usage, receipt = self._totals(call, trail, parser)
        assert parser.finish_reason is not None
        await exchange.answer(200, writer.body(parser.finish_reason, usage.as_fields(), receipt))

    async def _stream(
        self, exchange: Exchange, call: ChatCall, trail: Trail, parser: OutputParser, head: AnswerHead
    ) -> None:
        """Server-sent events. The status line waits for the first token, so that early failures keep theirs."""
        writer = ChunkWriter(
            head,
            self._dialect,
            thinking=call.chat.effort is not None,
            include_usage=call.body.include_usage,
        )
        chunks = self.parts.pipeline.generate(call.request, trail)
        named = False
        feed = TokenFeed(
            chunks, deadline_at=call.request.deadline_at, silence_s=self.parts.config.keep_alive_s
        )
        async with feed:
            while not parser.finished:
                deltas = await self._next_deltas(feed, parser)
                if deltas is None:
                    await self._send(exchange, KEEP_ALIVE)
                    continue
                events = writer.deltas(deltas)
                if not named:
                    events, named = writer.first() + events, True
                if parser.finish_reason is not None:
                    usage, receipt = self._totals(call, trail, parser)
                    events += writer.last(parser.finish_reason, usage.as_fields(), receipt)
                if events:
                    await self._send(exchange, events, last=parser.finished)

    async def _next_deltas(self, feed: TokenFeed, parser: OutputParser) -> list[Delta] | None:
        """What the tokens that are ready say; None if there were none for a while."""
        loop = asyncio.get_running_loop()
        waiting_since = loop.time()
        tokens = await feed.take()
        if tokens is None:
            return None
        if parser.completion_tokens and tokens:
            self.parts.metrics.itl.observe(loop.time() - waiting_since)
        deltas = parser.push(tokens)
        if feed.finish_reason is not None:
            deltas += parser.finish(feed.finish_reason)
        return deltas

    async def _send(self, exchange: Exchange, events: bytes, *, last: bool = False) -> None:
        if not exchange.started:
            await exchange.start_stream()
        await exchange.stream(events, last=last)

    def _totals(
        self, call: ChatCall, trail: Trail, parser: OutputParser
    ) -> tuple[Usage, dict[str, object] | None]:
        usage = Usage(
            len(call.request.tokens), trail.cached_tokens, parser.completion_tokens, parser.reasoning_tokens
        )
        if not call.body.receipt:
            return usage, None
        return usage, receipt_of(call.request, trail, finished_at=asyncio.get_running_loop().time())

    def _record(self, exchange: Exchange, call: ChatCall, trail: Trail, parser: OutputParser) -> None:
        metrics = self.parts.metrics
        metrics.events.inc(exchange.writes)
        metrics.prompt_tokens.inc(len(call.request.tokens))
        metrics.prompt_size.observe(len(call.request.tokens))
        metrics.cached_tokens.inc(trail.cached_tokens)
        metrics.completion_tokens.inc(parser.completion_tokens)
        metrics.reasoning_tokens.inc(parser.reasoning_tokens or 0)
        metrics.retries.inc(trail.retries)
        metrics.resumes.inc(trail.resumes)
        if trail.placed_at:
            metrics.prepare.observe(trail.placed_at - trail.body_at)
        if trail.first_token_at:
            metrics.ttft.observe(trail.first_token_at - trail.received_at)
        if parser.finished:
            metrics.e2e.observe(asyncio.get_running_loop().time() - trail.received_at)
        if parser.finish_reason == "stop" and not parser.answered:
            metrics.empty_answers.inc()
