"""The cluster token and the wire version: in the metadata of every call, checked before any handler runs.

The token keeps strangers and mistaken configurations out; it is no encryption. Compared in constant time. The version
keeps processes apart that would take each other's words for something else while an installation is upgraded.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import grpc
from epdserve.services.errors import InvalidRequest, ServiceError, Unauthenticated, Unavailable
from epdserve.services.rpc.status import status_of
from epdserve.services.types import WIRE_VERSION

TOKEN_KEY: Final = "epdserve-cluster-token"
VERSION_KEY: Final = "epdserve-wire-version"
MIN_TOKEN_CHARS: Final = 16
_UNTOLD: Final = "1"  # what calls without the key speak


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata a client sends with every call."""
    return ((TOKEN_KEY, token), (VERSION_KEY, str(WIRE_VERSION)))


def read_token(path: Path) -> str:
    """The cluster token in a file.

    Raises:
        InvalidRequest: The file cannot be read, or what it holds is no token.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cluster token file {path}: {error}", param="cluster_token_file") from error
    if len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise InvalidRequest(
            f"cluster token file {path} holds no token of {MIN_TOKEN_CHARS} or more printable characters",
            param="cluster_token_file",
        )
    return token


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Refuses every call without the cluster token, or of another wire version."""

    def __init__(self, token: str) -> None:
        if len(token) < MIN_TOKEN_CHARS:
            raise ValueError(f"a cluster token has {MIN_TOKEN_CHARS} or more characters, got {len(token)}")
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler asked for, or one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        if not self._holds(handler_call_details):
            return _refusing(handler, Unauthenticated("cluster token missing or wrong"))
        if (spoken := _version(handler_call_details)) != str(WIRE_VERSION):
            told = f"the caller speaks wire version {spoken[:20]!r}, this process {WIRE_VERSION}"
            return _refusing(handler, Unavailable(told))
        return handler

    def _holds(self, details: grpc.HandlerCallDetails) -> bool:
        for key, value in details.invocation_metadata or ():
            if key == TOKEN_KEY:
                given = value.encode() if isinstance(value, str) else bytes(value)
                return hmac.compare_digest(given, self._token)
        return False


def _version(details: grpc.HandlerCallDetails) -> str:
    for key, value in details.invocation_metadata or ():
        if key == VERSION_KEY:
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return _UNTOLD


def _refusing(
    handler: grpc.RpcMethodHandler[Any, Any], error: ServiceError
) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same shape: gRPC reads the request as the shape says before it calls."""

    async def refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(*status_of(error))

    async def refuse_stream(
        request: object, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        await refuse(request, context)
        yield b""

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
