"""Runs the application: uvicorn with uvloop and httptools, limits, a clean end on SIGTERM and SIGINT."""

from __future__ import annotations

import asyncio
import errno
import socket

import uvicorn
from epdserve.services.errors import Unavailable
from epdserve.services.router.app import create_app
from epdserve.services.router.cluster import Cluster
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.http_protocol import protocol_with
from fastapi import FastAPI

_BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        Unavailable: The address is taken or not ours; the message says which.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        taken = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be bound: {error.strerror}"
        raise Unavailable(f"{host}:{port} {taken}") from None
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def uvicorn_server(app: FastAPI, config: RouterConfig) -> uvicorn.Server:
    """A server for the application with the router's limits; not started."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol_with(
                max_header_bytes=config.max_header_bytes,
                header_timeout_s=config.header_timeout_s,
                max_connections=config.max_connections,
            ),
            loop="uvloop",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(config.drain_timeout_s)),
        )
    )


async def serve(config: RouterConfig, cluster: Cluster) -> None:
    """Serve until told to end; what runs may finish within ``drain_timeout_s``.

    Raises:
        Unavailable: The address cannot be bound.
    """
    app = create_app(config, cluster)
    with bind(config.host, config.port) as sock:
        await uvicorn_server(app, config).serve(sockets=[sock])


def run(config: RouterConfig, cluster: Cluster) -> None:
    """``serve`` on a uvloop of its own; what a process's main calls."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, cluster))
