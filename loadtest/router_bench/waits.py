"""Waits between the events of streams that never end, over a while: what a stream feels of its neighbours."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit


@contextmanager
def steady_streams(url: str, body: bytes, *, clients: int) -> Iterator[Callable[[float], list[float]]]:
    """Streams that run until the block ends.

    Yields:
        Reads them for so many seconds and tells the seconds between reads of each; what came before is not among them.
    """
    parts = urlsplit(url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(clients):
            sock = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80))
            stack.callback(sock.close)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(request)
            selector.register(sock, selectors.EVENT_READ)
        yield lambda seconds: _waits(selector, request, seconds)


def _waits(selector: selectors.BaseSelector, request: bytes, seconds: float) -> list[float]:
    waits: list[float] = []
    last: dict[
        socket.socket, float
    ] = {}  # no wait before the first read: it has gathered what came in a pause
    end_at = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end_at:
        for key, _ in selector.select(timeout=end_at - now):
            sock: socket.socket = key.fileobj  # type: ignore[assignment]
            data = sock.recv(262_144)
            now = time.perf_counter()
            if not data:
                raise ConnectionError("a stream was cut off")
            if sock in last:
                waits.append(now - last[sock])
            last[sock] = now
            if b"[DONE]" in data[-32:]:
                sock.sendall(request)
                del last[sock]
    return waits
