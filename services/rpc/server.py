"""The gRPC server of a worker: handlers in, address out.

Binds to loopback unless told otherwise, wants the cluster token on every call, and maps what handlers raise.
The network has no encryption of its own; beyond one machine it belongs into a private one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import grpc
from epdserve.services.errors import Unavailable
from epdserve.services.rpc.auth import TokenInterceptor
from epdserve.services.rpc.channel import SERVER_OPTIONS
from epdserve.services.rpc.decode_server import DecodeSessions
from epdserve.services.rpc.handlers import PrefillHandler, WorkerHandler
from epdserve.services.rpc.pages import add_pages
from epdserve.services.rpc.pb import decode_pb2_grpc, prefill_pb2_grpc
from epdserve.services.rpc.servicers import DecodeServicer, PrefillServicer

log = logging.getLogger(__name__)


class Watched(Protocol):
    """A servicer whose streams would never end by themselves."""

    def end_watches(self) -> None:
        """Cut them off."""


class RpcServer:
    """A running server.

    Attributes:
        address: ``host:port`` it really listens on.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        address: str,
        servicer: Watched,
        sessions: DecodeSessions | None = None,
    ) -> None:
        self._server, self._servicer, self._sessions = server, servicer, sessions
        self.address = address

    async def stop(self, *, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` to end, then cut them off.

        Streams that last are ended first. A decode worker that wants its output to arrive calls
        ``DecodeSessions.fail_all`` and ``drained`` before.
        """
        self._servicer.end_watches()
        if self._sessions is not None:
            await self._sessions.stop()
        async with asyncio.timeout(grace_s + 5.0):
            await self._server.stop(grace_s)
        log.info("rpc server stopped", extra={"address": self.address})


async def serve_prefill(
    handler: PrefillHandler,
    *,
    token: str,
    address: str = "127.0.0.1:0",
    beside: Callable[[grpc.aio.Server], None] | None = None,
) -> RpcServer:
    """Serve a prefill worker.

    Args:
        handler: Does the work.
        token: The cluster token.
        address: ``host:port``; port 0 takes a free one.
        beside: Adds what else is served there.

    Raises:
        Unavailable: The address cannot be bound.
    """
    server = new_server(token)
    servicer = PrefillServicer(handler)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    add_pages(handler, server)
    if beside is not None:
        beside(server)
    return RpcServer(server, await start_server(server, address), servicer)


async def serve_decode(
    handler: WorkerHandler, sessions: DecodeSessions, *, token: str, address: str = "127.0.0.1:0"
) -> RpcServer:
    """Serve a decode worker; arguments as for ``serve_prefill``.

    Starts ``sessions``, and stops them with the server.

    Raises:
        Unavailable: The address cannot be bound.
    """
    servicer = DecodeServicer(handler, sessions)
    return await serve_servicer(servicer, sessions, token=token, address=address, handler=handler)


async def serve_servicer(
    servicer: DecodeServicer,
    sessions: DecodeSessions,
    *,
    token: str,
    address: str,
    handler: WorkerHandler | None = None,
) -> RpcServer:
    """``serve_decode`` with a servicer of the caller's own."""
    server = new_server(token)
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server)
    add_pages(handler, server)
    bound = await start_server(server, address)
    sessions.start()
    return RpcServer(server, bound, servicer, sessions)


def new_server(token: str) -> grpc.aio.Server:
    """A server that wants the token; without services yet."""
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=[TokenInterceptor(token)])


async def start_server(server: grpc.aio.Server, address: str) -> str:
    """Bind and start; the address with its real port."""
    host, _, _ = address.rpartition(":")
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}") from error
    if port == 0:
        raise Unavailable(f"cannot listen on {address}")
    await server.start()
    log.info("rpc server listens", extra={"address": f"{host}:{port}"})
    return f"{host}:{port}"
