"""Waits between the events of streams that never end, over a while: what a stream feels of its neighbours."""

from __future__ import annotations

import selectors
import socket
import time
from urllib.parse import urlsplit


def waits_between_events(url: str, body: bytes, *, clients: int, seconds: float) -> list[float]:
    """Seconds between reads of each of ``clients`` streams; a stream that ends is asked again."""
    parts = urlsplit(url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    waits: list[float] = []
    with selectors.DefaultSelector() as selector:
        last: dict[socket.socket, float] = {}
        for _ in range(clients):
            sock = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 80))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(head.encode() + body)
            selector.register(sock, selectors.EVENT_READ)
            last[sock] = 0.0
        end_at = time.perf_counter() + seconds
        while (now := time.perf_counter()) < end_at:
            for key, _ in selector.select(timeout=end_at - now):
                sock = key.fileobj  # type: ignore[assignment]
                data = sock.recv(262_144)
                now = time.perf_counter()
                if not data:
                    raise ConnectionError("a stream was cut off")
                if last[sock]:
                    waits.append(now - last[sock])
                last[sock] = now
                if b"[DONE]" in data[-32:]:
                    sock.sendall(head.encode() + body)
                    last[sock] = 0.0
        for sock in last:
            sock.close()
    return waits
