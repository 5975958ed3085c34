"""One request's way to its connection, past the framework's messages: each of them costs more than what it carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

EXTENSION: Final = "epdserve.client"


class ClientSide:
    """Owned by the event loop. What it writes is the server's own cycle's answer, as if that had been sent messages."""

    __slots__ = ("_chunked", "cycle", "watch")

    def __init__(self, watch: Callable[[Callable[[], None] | None], None]) -> None:
        """One for a request; the server's cycle is set before anything is asked of it.

        Args:
            watch: Has a function called when the client goes, once; None = no more.
        """
        self.watch = watch
        self._chunked = True
        self.cycle: RequestResponseCycle

    def take_body(self) -> bytes | None:
        """The whole body, if all of it is here; it is asked for by messages otherwise."""
        cycle = self.cycle
        if cycle.more_body or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def abort(self) -> None:
        """Drop the connection without waiting for bytes that nobody reads."""
        self.cycle.transport.abort()

    @property
    def paused(self) -> bool:
        """Whether the client has to read before more is written."""
        return self.cycle.flow.write_paused and not self.cycle.disconnected

    async def drain(self) -> None:
        """Until it has."""
        await self.cycle.flow.drain()

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """The status line and headers of an answer, names in lower case."""
        cycle = self.cycle
        if cycle.disconnected:
            return
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        names = {name for name, _ in headers}
        self._chunked = b"content-length" not in names
        lines = [STATUS_LINE[status]]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if b"connection" in names:  # which says nothing but "close"
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"transfer-encoding: chunked\r\n\r\n" if self._chunked else b"\r\n")
        cycle.transport.write(b"".join(lines))

    def write(self, body: bytes, *, last: bool) -> None:
        """Bytes of the answer."""
        cycle = self.cycle
        if cycle.disconnected:
            return
        if self._chunked:
            # An empty chunk would be the end
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if last:
                body += b"0\r\n\r\n"
        cycle.transport.write(body)
        if last:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()
