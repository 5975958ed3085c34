"""A process's metrics and the port they are read from.

Each process has one registry of its own, handed to whatever counts; the global one of prometheus_client is never
used, so that several roles in one process, and tests, do not meet in it.
"""

from __future__ import annotations

import asyncio
from threading import Thread
from typing import Any, Self
from wsgiref.simple_server import WSGIServer

from epdserve.services.errors import Unavailable
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector


def new_registry(*, process: bool = True) -> CollectorRegistry:
    """A registry.

    Args:
        process: With memory, CPU time, file descriptors and garbage collection of this process.
    """
    registry = CollectorRegistry()
    if process:
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
    return registry


class MetricsServer:
    """``/metrics`` of one registry over HTTP, served by threads of its own.

    Args:
        registry: What is served.
        address: ``host:port``; port 0 takes a free one. Loopback unless told otherwise.

    Raises:
        Unavailable: The address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, *, address: str = "127.0.0.1:0") -> None:
        host, _, port = address.rpartition(":")
        try:
            started: tuple[WSGIServer, Thread] = start_http_server(int(port), addr=host, registry=registry)
        except (OSError, OverflowError, ValueError) as error:
            raise Unavailable(f"cannot serve metrics on {address}: {error}") from error
        self._server, self._thread = started
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Stop serving; waits for the thread, so not for an event loop (see ``aclose``)."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)

    async def aclose(self) -> None:
        """Stop serving without holding up the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
