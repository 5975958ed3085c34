"""The answers a worker gives to an orchestrator's probes: two words over HTTP, on a port of their own.

``/live`` is 200 while the event loop turns and no step hangs: what restarts a worker. ``/ready`` is 200 while routers
may send work: registered and not draining. Neither tells anything else, and nothing can be done through this port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from epdserve.services.errors import Unavailable

_READ_S: Final = 2.0
_MAX_REQUEST_BYTES: Final = 4096


class ProbeServer:
    """Answers probes. Owned by one event loop; a loop that hangs answers nobody, which is the point.

    Args:
        live: Why the process should be restarted, or nothing.
        ready: Why no work should come, or nothing.
    """

    def __init__(self, live: Callable[[], str], ready: Callable[[], str]) -> None:
        self._answers = {"/live": live, "/ready": ready}
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one, told by ``port``.

        Raises:
            Unavailable: The address cannot be bound.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_REQUEST_BYTES)
        except OSError as error:
            raise Unavailable(f"cannot answer probes on {host}:{port}: {error.strerror}") from error
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(
                OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
            ):
                async with asyncio.timeout(_READ_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
        answer = self._answers.get(words[1].partition("?")[0]) if len(words) == 3 else None
        if answer is None or words[0] not in ("GET", "HEAD"):
            status, text = "404 Not Found", "nothing here"
        elif reason := answer():
            status, text = "503 Service Unavailable", reason
        else:
            status, text = "200 OK", "ok"
        body = text.encode("ascii", "replace") + b"\n"
        lines = [
            f"HTTP/1.1 {status}",
            "Content-Type: text/plain",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if words[0] == "HEAD" else body)
