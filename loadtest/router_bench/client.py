"""A client that only counts: raw sockets, one request after another on each, events told apart by their first bytes.

It costs little, so that what is measured is the server; it shares the machine's cores with it all the same.
"""

from __future__ import annotations

import re
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

_END: Final = b"data: [DONE]\n\n"
_EVENT: Final = b"data: {"
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3})")


@dataclass(slots=True)
class Counted:
    """What came back.

    Attributes:
        ttft_s: Request sent to first event, one a stream.
        events: Events of all streams, ``[DONE]`` not among them.
        stalls_s: Longest wait between bytes of a stream, one a stream.
    """

    streams: int = 0
    events: int = 0
    failed: int = 0
    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)

    @property
    def requests_per_s(self) -> float:
        """Streams that ended, a second."""
        return self.streams / self.wall_s if self.wall_s else 0.0


class _Stream:
    """One connection and the request on it."""

    def __init__(self, address: tuple[str, int], request: bytes, *, quick_acks: bool) -> None:
        self.sock = socket.create_connection(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self._request = request
        self._quick_acks = quick_acks
        self.send()

    def send(self) -> None:
        """Ask once more."""
        self._tail = b""
        self.sent_at = self.last_at = time.perf_counter()
        self.first_at = 0.0
        self.events = 0
        self.stall_s = 0.0
        self.sock.sendall(self._request)

    def read(self) -> bool:
        """Take what has come; whether the stream has ended.

        Raises:
            ConnectionError: It was cut off, or what came is no stream.
        """
        data = self.sock.recv(262_144)
        if not data:
            raise ConnectionError("closed")
        if self._quick_acks:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        now = time.perf_counter()
        seen = self._tail + data
        if not self.first_at:
            if (found := _STATUS.search(seen)) is not None and found[1] != b"200":
                raise ConnectionError(seen[:200].decode("latin-1"))
            if _EVENT in seen:
                self.first_at = now
        elif now - self.last_at > self.stall_s:
            self.stall_s = now - self.last_at
        self.last_at = now
        # An event that is cut apart by a read is counted with its second half
        self.events += seen.count(_EVENT) - self._tail.count(_EVENT)
        self._tail = seen[-32:]
        return _END in seen[-256:]


def count(
    url: str, path: str, body: bytes, *, clients: int, seconds: float, quick_acks: bool = False
) -> Counted:
    """Keep ``clients`` requests running for a while.

    Args:
        url: Base address.
        body: JSON of a streamed request.
    """
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    counted = Counted()
    began = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        streams = [_Stream(address, request, quick_acks=quick_acks) for _ in range(clients)]
        for stream in streams:
            selector.register(stream.sock, selectors.EVENT_READ, stream)
        try:
            while selector.get_map() and (now := time.perf_counter()) < began + seconds:
                for key, _ in selector.select(timeout=began + seconds - now):
                    _take(key.data, selector, counted)
        finally:
            for stream in streams:
                stream.sock.close()
    counted.wall_s = time.perf_counter() - began
    return counted


def _take(stream: _Stream, selector: selectors.BaseSelector, counted: Counted) -> None:
    try:
        if not stream.read():
            return
    except ConnectionError:
        counted.failed += 1
        selector.unregister(stream.sock)
        return
    counted.streams += 1
    counted.events += stream.events
    counted.ttft_s.append(stream.first_at - stream.sent_at)
    counted.stalls_s.append(stream.stall_s)
    stream.send()
