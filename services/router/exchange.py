"""One HTTP exchange at the ASGI level: read a bounded body, notice a client that leaves, write answers and streams.

Raw ASGI instead of framework responses: this path carries every token, and needs to see disconnects itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final

from epdserve.services.errors import Cancelled, PayloadTooLarge, ServiceError
from epdserve.services.router.client_side import EXTENSION, ClientSide
from epdserve.services.router.http_errors import (
    BodyTooSlow,
    UnsupportedEncoding,
    error_headers,
    status_of,
)
from epdserve.services.router.patience import Patience
from starlette.types import Receive, Scope, Send

_JSON: Final = (b"content-type", b"application/json")
_STREAM_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would collect events otherwise
    (b"x-accel-buffering", b"no"),
)
# How much of a refused body is read and dropped: a close with unread bytes resets the connection, and the client
# would lose the answer that says why
_DISCARD_BYTES: Final = 32 * 2**20
_DISCARD_S: Final = 2.0


class Exchange:
    """A request being answered. One task owns it.

    Attributes:
        started: Whether the status line has left.
        status: Its status, 0 before.
        whole: A whole answer has begun before it was known.
        say_failure: Bytes that end a stream which has begun; None = as the endpoint says it.
        writes: How often bytes of a stream were handed to the server.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, send_stall_s: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._client: ClientSide | None = scope.get("extensions", {}).get(EXTENSION)
        self._send_stall_s = send_stall_s
        self._patience: Patience | None = None
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._body_complete = False
        self._complete = False
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.say_failure: Callable[[ServiceError], bytes] | None = None
        self.started = self.whole = False
        self.status = 0
        self.writes = 0

    @property
    def path(self) -> str:
        """Of the request."""
        path: str = self._scope["path"]
        return path

    def header(self, name: str) -> str:
        """A request header, empty if absent; the last one of several."""
        said = self._headers.get(name.encode())
        return said.decode("latin-1") if said else ""

    async def read_body(self, *, max_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        """The whole body.

        Args:
            take: Told of each part's size before it is kept; what it raises is raised here.

        Raises:
            PayloadTooLarge: Over ``max_bytes``, said by its length or found while reading; the rest is not read.
            UnsupportedEncoding: Compressed.
            BodyTooSlow: Not complete within ``timeout_s``.
            Cancelled: The client has gone.
        """
        if self.header("content-encoding") not in ("", "identity"):
            raise UnsupportedEncoding("compressed bodies are not accepted")
        length = self.header("content-length")
        if length.isdigit() and int(length) > max_bytes:
            raise PayloadTooLarge(f"the body has {length} bytes, the limit is {max_bytes}")
        if self._client is not None and (body := self._client.take_body()) is not None:
            self._body_complete = True
            if len(body) > max_bytes:
                raise PayloadTooLarge(f"the body has more than {max_bytes} bytes")
            take(len(body))
            return body
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while not self._body_complete:
                    part = await self._next_part()
                    size += len(part)
                    if size > max_bytes:
                        raise PayloadTooLarge(f"the body has more than {max_bytes} bytes")
                    take(len(part))
                    parts.append(part)
        except TimeoutError:
            raise BodyTooSlow(f"the body was not complete after {timeout_s} s") from None
        return b"".join(parts)

    def watch_client(self) -> ClientWatch:
        """Cancel what runs inside as soon as the client has gone, and raise ``Cancelled`` instead."""
        return ClientWatch(self)

    @property
    def complete(self) -> bool:
        """Whether the last byte has been written."""
        return self._complete

    def on_leave(self, call: Callable[[], None] | None) -> asyncio.Task[None] | None:
        """Call back when the client goes, None = no more: the server does, else a task that listens to what it says."""
        if self._client is not None:
            self._client.watch(call)
        elif call is not None:
            return asyncio.create_task(self._listen(call))
        return None

    async def _listen(self, on_leave: Callable[[], None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        on_leave()

    async def answer(
        self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """A whole JSON answer."""
        await self._start(status, [_JSON, (b"content-length", str(len(body)).encode()), *(headers or ())])
        await self._write(body, more=False)

    async def answer_error(self, error: ServiceError, body: bytes) -> None:
        """A whole answer that says what went wrong; what is left of the body is read and dropped first."""
        headers = [_JSON, (b"content-length", str(len(body)).encode()), *error_headers(error)]
        if self._body_complete:
            await self._start(status_of(error), headers)
            await self._write(body, more=False)
            return
        await self._start(status_of(error), [*headers, (b"connection", b"close")])
        await self._write(body, more=True)
        await self._discard()
        await self._write(b"", more=False)

    async def wait_visibly(self) -> None:
        """Begin a whole JSON answer if it has not begun, with a blank line: readers of JSON skip it, proxies see life.

        The status is said with it: what goes wrong afterwards can only be said in the body.
        """
        if not self.started:
            self.whole = True
            await self._start(200, [_JSON])
        await self.stream(b"\n")

    async def finish_answer(self, body: bytes) -> None:
        """A whole JSON answer, or the rest of one that has begun."""
        if self.started:
            await self.stream(body, last=True)
        else:
            await self.answer(200, body)

    async def start_stream(self) -> None:
        """Headers of an event stream."""
        await self._start(200, list(_STREAM_HEADERS))

    async def stream(self, events: bytes, *, last: bool = False) -> None:
        """Bytes of an event stream; a client that takes none of them for too long is cut off."""
        self.writes += 1
        await self._write(events, more=not last)

    def say(self, *headers: tuple[bytes, bytes]) -> None:
        """Send headers with the status line, in place of earlier ones of the same names."""
        names = {name for name, _ in headers}
        self.extra_headers = [*(one for one in self.extra_headers if one[0] not in names), *headers]

    def close(self) -> None:
        """Nothing is written after this."""
        if self._patience is not None:
            self._patience.close()

    def _cut(self) -> None:
        """Drop the connection without waiting for bytes that nobody reads; the server reports a disconnect."""
        if self._client is not None:
            self._client.abort()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started, self.status = True, status
        headers += self.extra_headers
        if self._client is not None:
            await self._room()
            self._client.start(status, headers)
        else:
            await self._patiently(
                self._send({"type": "http.response.start", "status": status, "headers": headers})
            )

    async def _write(self, body: bytes, *, more: bool) -> None:
        self._complete = not more
        if self._client is not None:
            await self._room()
            self._client.write(body, last=not more)
        else:
            await self._patiently(self._send({"type": "http.response.body", "body": body, "more_body": more}))

    async def _room(self) -> None:
        """Wait for a client that reads more slowly than we write."""
        if self._client is not None and self._client.paused:
            await self._patiently(self._client.drain())

    async def _patiently(self, sending: Awaitable[None]) -> None:
        if self._patience is None:
            self._patience = Patience(self._send_stall_s, self._cut)
        self._patience.begin()
        await sending
        self._patience.end()

    async def _next_part(self) -> bytes:
        message: Any = await self._receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the client has gone")
        self._body_complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def _discard(self) -> None:
        left = _DISCARD_BYTES
        try:
            async with asyncio.timeout(_DISCARD_S):
                while left > 0 and not self._body_complete:
                    left -= len(await self._next_part())
        except (TimeoutError, Cancelled):
            return


class ClientWatch:
    """The context of ``Exchange.watch_client``; the task that enters it is cancelled."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False

    async def __aenter__(self) -> None:
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        self._listener = self._exchange.on_leave(self._leave)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.on_leave(None)
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        if not self._gone:
            return
        late: asyncio.CancelledError | None = None
        try:
            # Where a cancellation lands that came after the last await inside
            await asyncio.sleep(0)
        except asyncio.CancelledError as cancelled:
            late = cancelled
        # A call that fails as it is cancelled tells its failure, not the cancelling
        if (
            late or isinstance(error, (asyncio.CancelledError, ServiceError))
        ) and self._owner.uncancel() == 0:
            raise Cancelled("the client has gone") from None
        if late is not None:
            raise late

    def _leave(self) -> None:
        # Servers report a disconnect after the last byte as well
        if not self._exchange.complete:
            self._gone = True
            self._owner.cancel()
