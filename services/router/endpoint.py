"""What every generating endpoint does around its own protocol: ids, keys, bounds, disconnects, failures, outcomes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from typing import Final

from epdserve.services.errors import Cancelled, Internal, ServiceError, Unavailable
from epdserve.services.observability.logs import for_request
from epdserve.services.router.exchange import Exchange
from epdserve.services.router.http_errors import ErrorStyle
from epdserve.services.router.options import Caller
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.request import Trail, now
from epdserve.services.router.slo import wish_of_headers
from epdserve.services.router.traces import RequestTrace
from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Endpoint(ABC):
    """An ASGI application for one path. The framework sees nothing of it: every token goes through here."""

    def __init__(self, parts: RouterParts, errors: ErrorStyle | None = None) -> None:
        self.parts = parts
        self._errors = errors if errors is not None else ErrorStyle()

    @abstractmethod
    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller, trail: Trail) -> None:
        """Answer a request whose body has come. Cancelled when the client leaves.

        Raises:
            ServiceError: The answer is this error: with its status, or as an event if the stream has begun.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; every failure ends here."""
        exchange = Exchange(scope, receive, send, send_stall_s=self.parts.config.send_stall_s)
        metrics = self.parts.metrics
        outcome = "internal"
        metrics.in_flight += 1
        try:
            outcome = await self._answer(exchange)
        finally:
            exchange.close()
            metrics.in_flight -= 1
            metrics.finished(outcome)

    async def _answer(self, exchange: Exchange) -> str:
        """Serve, or say what went wrong; the outcome's name."""
        given = exchange.header("x-request-id")
        # The caller's own id is for his logs and ours; workers get another, because it may come twice
        name = given if _REQUEST_ID.fullmatch(given) else os.urandom(16).hex()
        exchange.extra_headers.append((b"x-request-id", name.encode()))
        with for_request(name):
            failure = await self._attempt(exchange, name)
            if failure is not None:
                await self._tell(exchange, failure, name)
                if not isinstance(failure, Cancelled):
                    self.parts.present.failed(name, exchange.path, failure, at=time.time())
            outcome = "ok" if failure is None else failure.code
            _log.debug("request finished", extra={"outcome": outcome, "status": exchange.status})
        return outcome

    async def _attempt(self, exchange: Exchange, name: str) -> ServiceError | None:
        """Serve; what went wrong, if anything."""
        try:
            await self._serve(exchange, name)
        except ServiceError as error:
            return error
        except asyncio.CancelledError:
            # Nobody cancels this task but the server, whose patience with a shutdown is over
            return Unavailable("the server shuts down")
        except Exception:  # noqa: BLE001 - edge of the process: a bug must answer 500 and not kill the connection
            _log.exception("request failed")
            return Internal("the server failed; its log has the request id")
        return None

    async def _serve(self, exchange: Exchange, name: str) -> None:
        parts, config = self.parts, self.parts.config
        trail = Trail(received_at=now())
        tenant = parts.gate.authenticate(
            authorization=exchange.header("authorization"), api_key=exchange.header("x-api-key")
        )
        parts.admission.refuse_if_full()
        given = exchange.header("traceparent")
        trace = RequestTrace(
            parts.tracing, exchange.path, trail, given=given if _TRACE.fullmatch(given) else ""
        )
        caller = Caller(
            os.urandom(16).hex(),
            tenant.cache_name,
            trace.parent,
            parts.gate.epochs.stamp(tenant),
            tenant.name,
            wish_of_headers(exchange.header),
            trail.received_at,
        )
        parts.placer.call(caller.request_id, name)
        error: ServiceError | None = None
        try:
            async with parts.gate.enter(tenant) as stay:
                with (
                    parts.present.inside(name, exchange.path, tenant.name, trail),
                    parts.bodies.share() as share,
                ):
                    raw = await exchange.read_body(
                        max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s, take=share.take
                    )
                    trail.body_at = now()
                    try:
                        async with exchange.watch_client():
                            await self.handle(exchange, raw, caller, trail)
                    finally:
                        stay.tokens = trail.charged_tokens
        except ServiceError as failure:
            error = failure
            raise
        finally:
            trace.end(error, request_id=name, tenant=tenant.name)

    async def _tell(self, exchange: Exchange, failure: ServiceError, name: str) -> None:
        """Say it to the client, if there still is one."""
        if isinstance(failure, Cancelled):
            return
        try:
            if not exchange.started:
                await exchange.answer_error(failure, self._errors.body(failure, name))
            elif exchange.whole:
                await exchange.stream(self._errors.body(failure, name), last=True)
            elif exchange.say_failure is not None:
                await exchange.stream(exchange.say_failure(failure), last=True)
            else:
                await exchange.stream(self._errors.event(failure, name), last=True)
        except Cancelled:
            return
