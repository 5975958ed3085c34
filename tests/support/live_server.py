"""The router on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from epdserve.services.router.app import RouterApp, create_app
from epdserve.services.router.config import RouterConfig
from epdserve.services.router.server import bind, uvicorn_server
from support.fake_cluster import FakeCluster
from support.real_tokenizer import real_tokenizer


@dataclass
class LiveRouter:
    """A running router."""

    server: uvicorn.Server
    port: int
    app: RouterApp

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


async def eventually(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: It does not.
    """
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - conditions are anything a test can see
            await asyncio.sleep(0.002)


@asynccontextmanager
async def live_router(
    config: RouterConfig, cluster: FakeCluster, *, send_buffer_bytes: int = 0
) -> AsyncIterator[LiveRouter]:
    """Serve a scripted cluster on a free port until the block ends.

    Args:
        send_buffer_bytes: Of accepted sockets, 0 = the system's.
    """
    sock = bind("127.0.0.1", 0)
    if send_buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    app = create_app(config, cluster, tokenizer=real_tokenizer())
    server = uvicorn_server(app, config)
    # Signals belong to pytest
    task = asyncio.create_task(server._serve([sock]))
    try:
        await eventually(lambda: server.started)
        yield LiveRouter(server, sock.getsockname()[1], app)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)
