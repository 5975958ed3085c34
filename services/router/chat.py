"""``chat/completions``: one HTTP exchange from the first byte in to the last byte out."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from contextlib import aclosing
from typing import Final

from epdserve.services.errors import Cancelled, DeadlineExceeded, Internal, ServiceError
from epdserve.services.router.chat_request import Caller, ChatCall, prepare_chat
from epdserve.services.router.exchange import Exchange
from epdserve.services.router.feed import TokenFeed
from epdserve.services.router.http_errors import error_body
from epdserve.services.router.parsing import Delta, OutputParser
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.request import Trail
from epdserve.services.router.shapes import (
    KEEP_ALIVE,
    AnswerHead,
    AnswerWriter,
    ChunkWriter,
    Dialect,
    error_event,
)
from epdserve.services.router.usage import Usage, receipt_of
from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class ChatEndpoint:
    """An ASGI application for one path. The framework sees nothing of it: every token goes through here."""

    def __init__(self, parts: RouterParts, dialect: Dialect) -> None:
        self._parts = parts
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every failure ends here."""
        exchange = Exchange(scope, receive, send, send_stall_s=self._parts.config.send_stall_s)
        metrics = self._parts.metrics
        outcome = "internal"
        metrics.in_flight.inc()
        try:
            outcome = await self._answer(exchange)
        finally:
            exchange.close()
            metrics.in_flight.dec()
            metrics.finished(outcome)

    async def _answer(self, exchange: Exchange) -> str:
        """Serve, or say what went wrong; the outcome's name."""
        request_id = _request_id(exchange)
        exchange.extra_headers.append((b"x-request-id", request_id.encode()))
        failure: ServiceError
        try:
            await self._serve(exchange)
            return "ok"
        except ServiceError as error:
            failure = error
        except Exception:  # noqa: BLE001 - edge of the process: a bug must answer 500 and not kill the connection
            _log.exception("request failed", extra={"request_id": request_id})
            failure = Internal("the server failed; its log has the request id")
        await self._fail(exchange, failure)
        return failure.code

    async def _serve(self, exchange: Exchange) -> None:
        parts, config = self._parts, self._parts.config
        trail = Trail(received_at=asyncio.get_running_loop().time())
        key_name = parts.keys.authenticate(
            authorization=exchange.header("authorization"), api_key=exchange.header("x-api-key")
        )
        parts.admission.refuse_if_full()
        raw = await exchange.read_body(max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
        trail.body_at = asyncio.get_running_loop().time()
        trace = exchange.header("traceparent")
        # The caller's id is not ours: it may come twice
        caller = Caller(secrets.token_hex(16), key_name, trace if _TRACE.fullmatch(trace) else "")
        async with exchange.watch_client():
            call = await prepare_chat(raw, parts, caller)
            del raw
            with parts.admission.enter(len(call.request.tokens)):
                await self._run(exchange, call, trail)

    async def _run(self, exchange: Exchange, call: ChatCall, trail: Trail) -> None:
        parser = OutputParser(call.chat, self._parts.tokenizer, call.request.sampling.stop_token_ids)
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
        chunks = self._parts.pipeline.generate(call.request, trail)
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
        chunks = self._parts.pipeline.generate(call.request, trail)
        named = False
        feed = TokenFeed(
            chunks, deadline_at=call.request.deadline_at, silence_s=self._parts.config.keep_alive_s
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
            self._parts.metrics.itl.observe(loop.time() - waiting_since)
        deltas = parser.push(tokens)
        if feed.finish_reason is not None:
            deltas += parser.finish(feed.finish_reason)
        return deltas

    async def _send(self, exchange: Exchange, events: bytes, *, last: bool = False) -> None:
        if not exchange.started:
            await exchange.start_stream()
        await exchange.stream(events, last=last)

    async def _fail(self, exchange: Exchange, failure: ServiceError) -> None:
        """Tell the client, if there still is one."""
        if isinstance(failure, Cancelled):
            return
        try:
            if exchange.started:
                await exchange.stream(error_event(error_body(failure)), last=True)
            else:
                await exchange.answer_error(failure)
        except Cancelled:
            return

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
        metrics = self._parts.metrics
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


def _request_id(exchange: Exchange) -> str:
    """The caller's own id if it is harmless, else a new one."""
    given = exchange.header("x-request-id")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
