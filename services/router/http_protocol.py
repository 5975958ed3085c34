"""Uvicorn's HTTP protocol with what it leaves out: no delayed small writes, bounded headers, a clock on headers, an end
that loses no request that is on its way.

asyncio and uvloop set TCP_NODELAY themselves today; it is set here all the same, because a stream without it stalls
44 ms a chunk with ordinary clients, and a test reads it back from accepted sockets.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

from epdserve.services.router.client_side import EXTENSION, ClientSide
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_REFUSAL: Final = (
    b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
)
_BODY: Final = b'{"error":{"message":"%b","type":"%b","param":null,"code":"%b"}}'
_WORDS: Final = {
    400: (b"Bad Request", b"invalid_request_error", b"invalid_request_error"),
    431: (b"Request Header Fields Too Large", b"invalid_request_error", b"headers_too_large"),
    503: (b"Service Unavailable", b"server_error", b"service_unavailable"),
}


class GatheringTransport:
    """A transport whose writes of one round of the loop leave together, as one system call.

    Each call lets Python's lock go, and to get it back from a thread takes longer than the call. A status line leaves
    with its first events this way, and a stream's last event with the end of the body.
    """

    __slots__ = ("_loop", "_parts", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self.is_closing = transport, loop, transport.is_closing
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Write, before the loop looks for anything new."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)

    def close(self) -> None:
        """Close once everything is written."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._parts.clear()
        self._transport.abort()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def flush(self) -> None:
        """Send what has been written by now."""
        if self._parts:
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._transport.write(data)


class RouterHttpProtocol(HttpToolsProtocol):
    """One connection. Limits are class attributes because uvicorn makes the instances; see ``protocol_with``."""

    max_header_bytes: int = 32 * 1024
    header_timeout_s: float = 10.0
    max_connections: int = 4096
    end_grace_s: float = 0.5
    _ending: bool = False
    _on_leave: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the socket up and give the first request's headers a time limit."""
        super().connection_made(transport)
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.max_connections:
            self._refuse(503, b"too many connections")
            return
        self.transport = GatheringTransport(transport, self.loop)  # type: ignore[assignment]
        self._start_header_timer()

    def shutdown(self) -> None:
        """The server ends: a request that is on its way, or that comes within a moment, still gets its answer."""
        self._ending = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(self.end_grace_s, self._close_if_idle)
        else:
            super().shutdown()

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer, and tell whoever writes an answer here."""
        self._stop_header_timer()
        super().connection_lost(exc)
        if (on_leave := self._on_leave) is not None:
            self._on_leave = None
            on_leave()

    def on_response_complete(self) -> None:
        """The last bytes leave before what is to be noted of the request."""
        if isinstance(self.transport, GatheringTransport):
            self.transport.flush()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Parse, unless the headers have grown too long."""
        if self.transport.is_closing():
            return
        # Only open headers count: a body has limits of its own
        if self._header_timer is not None and self._header_bytes + len(data) > self.max_header_bytes:
            room = self.max_header_bytes - self._header_bytes
            super().data_received(data[:room])
            if self._header_timer is not None:
                self._refuse(431, b"the headers are too large")
                return
            data = data[room:]
        if self._header_timer is not None:
            self._header_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        """The next request of a connection has a time limit from its first byte on."""
        super().on_message_begin()
        if self._header_timer is None:
            self._start_header_timer()

    def on_headers_complete(self) -> None:
        """Hand the request over, with its way back to this connection."""
        self._stop_header_timer()
        self._header_bytes = 0
        extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
        client = extensions[EXTENSION] = ClientSide(self._watch)
        super().on_headers_complete()
        client.cycle = self.cycle
        if self._ending and self.cycle is not None:
            self.cycle.keep_alive = False  # the answer says that it is this connection's last

    def _watch(self, on_leave: Callable[[], None] | None) -> None:
        """Call back when the client goes, once; None = no more. For the one request of the connection that is answered.

        A task that waits for the server's word on it would cost a request more than most of what it does.
        """
        self._on_leave = on_leave
        if on_leave is not None:
            self.flow.resume_reading()  # a long body paused it, and only readers hear an end

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the API's error body, too."""
        self._refuse(400, msg.encode("ascii", "replace"))

    def _refuse(self, status: int, message: bytes) -> None:
        self._stop_header_timer()
        phrase, kind, code = _WORDS[status]
        body = _BODY % (message, kind, code)
        self.transport.write(_REFUSAL % (status, phrase, len(body), body))
        self.transport.close()

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._headers_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        self.transport.abort()


def protocol_with(
    *, max_header_bytes: int, header_timeout_s: float, max_connections: int
) -> type[RouterHttpProtocol]:
    """A protocol class with these limits."""
    limits: dict[str, float] = {
        "max_header_bytes": max_header_bytes,
        "header_timeout_s": header_timeout_s,
        "max_connections": max_connections,
    }
    return type("ConfiguredHttpProtocol", (RouterHttpProtocol,), limits)
