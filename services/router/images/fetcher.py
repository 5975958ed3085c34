"""The one place where this system dials an address out of a request.

Rules, each with a test: https by allow-list; names are resolved once and the connection goes to exactly the address
that was checked; every address a name stands for must be public; redirects are followed by the same rules, few times;
bytes of an image and of a request, seconds and fetches at a time are bounded; no proxy, cookies, credentials or content
encodings.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final
from urllib.parse import urljoin

import httpcore
from epdserve.services.errors import InvalidRequest, PayloadTooLarge
from epdserve.services.router.images.addresses import is_public
from epdserve.services.router.images.budget import BytesLeft
from epdserve.services.router.images.config import ImageSettings
from epdserve.services.router.images.urls import AllowList, Target, parse_target

Resolve = Callable[[str, int], Awaitable[list[str]]]

_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS: Final = [
    (b"User-Agent", b"epdserve"),
    (b"Accept", b"image/png, image/jpeg, image/gif, image/webp"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
]


async def resolve_name(host: str, port: int) -> list[str]:
    """All addresses of a name; an address stands for itself.

    Raises:
        OSError: The name has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to one address, whatever the name says now."""

    def __init__(self, address: str) -> None:
        self._address, self._inner = address, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the library's signature
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return await self._inner.connect_tcp(self._address, port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,  # noqa: ASYNC109
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("no such socket")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


class ImageFetcher:
    """Fetches images from allowed hosts. Owned by one event loop.

    Args:
        resolve: A name's addresses.
        reachable: Whether an address may be dialled.
        tls: None is the system's trust.
    """

    def __init__(
        self,
        settings: ImageSettings,
        *,
        resolve: Resolve = resolve_name,
        reachable: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._settings, self._resolve, self._reachable = settings, resolve, reachable
        self._allowed = AllowList(settings.allowed_hosts)
        self._tls = tls
        self._places = asyncio.Semaphore(settings.max_fetches)

    async def fetch(self, url: str, budget: BytesLeft) -> bytes:
        """The bytes that a URL stands for.

        Args:
            budget: Of the request, with which all its fetches end.

        Raises:
            InvalidRequest: Against the rules, or it cannot be had; the message does not tell what lies where.
            PayloadTooLarge: More bytes than are taken.
        """
        if not self._allowed:
            raise InvalidRequest("this server fetches no images: send data URLs")
        settings = self._settings
        parse = partial(
            parse_target,
            allowed=self._allowed,
            allow_http=settings.allow_http,
            max_chars=settings.max_url_chars,
        )
        parse(url)
        try:
            async with asyncio.timeout(self._settings.fetch_timeout_s), self._places:
                for _ in range(self._settings.max_redirects + 1):
                    body, location = await self._get(parse(url), budget)
                    if location is None:
                        return body
                    url = urljoin(url, location)
        except TimeoutError:
            raise InvalidRequest(
                f"an image was not there within {self._settings.fetch_timeout_s} s"
            ) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise InvalidRequest("an image cannot be fetched") from None
        raise InvalidRequest(f"an image URL redirects more than {self._settings.max_redirects} times")

    async def _get(self, target: Target, budget: BytesLeft) -> tuple[bytes, str | None]:
        """Body, or where it is to be found instead."""
        address = await self._address_of(target)
        async with self._request(target, address) as response:
            if response.status in _REDIRECTS:
                location = _header(response, b"location")
                if not location:
                    raise InvalidRequest("an image URL redirects to nowhere")
                return b"", location
            if response.status != 200:
                raise InvalidRequest(f"an image URL answers {response.status}")
            if _header(response, b"content-encoding") not in ("", "identity"):
                raise InvalidRequest("an image comes in a content encoding")
            return await self._read(response, budget), None

    async def _address_of(self, target: Target) -> str:
        addresses = await self._resolve(target.host, target.port)
        # One bad address among good ones is a trap: which one is dialled must not be a matter of luck.
        if not addresses or not all(self._reachable(address) for address in addresses):
            raise InvalidRequest("this server does not fetch images from the address of an image URL")
        return addresses[0]

    @asynccontextmanager
    async def _request(self, target: Target, address: str) -> AsyncIterator[httpcore.Response]:
        url = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path
        )
        if self._tls is None:  # reading the system's trust takes tens of milliseconds: once
            self._tls = ssl.create_default_context()
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._tls, max_connections=1, network_backend=_Pinned(address)
            ) as pool,
            pool.stream("GET", url, headers=[(b"Host", target.authority), *_HEADERS]) as response,
        ):
            yield response

    async def _read(self, response: httpcore.Response, budget: BytesLeft) -> bytes:
        limit = self._settings.max_bytes
        told = _header(response, b"content-length")
        if told.isdigit() and int(told) > limit:
            raise PayloadTooLarge(f"an image has {told} bytes, {limit} are taken")
        parts, size = [], 0
        async with aclosing(response.aiter_stream()) as stream:  # type: ignore[type-var]
            async for part in stream:
                size += len(part)
                budget.take(len(part))
                if size > limit:
                    raise PayloadTooLarge(f"an image has more than {limit} bytes")
                parts.append(part)
        if not size:
            raise InvalidRequest("an image is empty")
        return b"".join(parts)


def _header(response: httpcore.Response, name: bytes) -> str:
    values = [value for key, value in response.headers if key.lower() == name]
    return values[-1].decode("latin-1").strip() if values else ""
