"""URLs of images: which are fetched at all, and what a data URL holds."""

from __future__ import annotations

import base64
import binascii
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from epdserve.services.errors import InvalidRequest, PayloadTooLarge

_PORTS: Final = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Target:
    """Where an image is fetched from: checked, but for the addresses that ``host`` stands for."""

    scheme: str
    host: str
    port: int
    path: bytes

    @property
    def authority(self) -> bytes:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}").encode()


class AllowList:
    """Hosts that images may come from; an empty one lets nothing pass.

    Args:
        entries: "host", "*.host", either with ":port".

    Raises:
        ValueError: An entry that is none of these.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._exact: set[tuple[str, int | None]] = set()
        self._below: set[tuple[str, int | None]] = set()
        for entry in entries:
            host, port = _host_and_port(entry)
            if host.startswith("*."):
                self._below.add((host[1:], port))
            else:
                self._exact.add((host, port))

    def __bool__(self) -> bool:
        return bool(self._exact or self._below)

    def allows(self, host: str, port: int, *, usual: int) -> bool:
        """Whether a host may be asked on a port; an entry without a port means the scheme's ``usual`` one."""

        def listed(name: str, entries: set[tuple[str, int | None]]) -> bool:
            return (name, port) in entries or (port == usual and (name, None) in entries)

        dots = [index for index, character in enumerate(host) if character == "."]
        return listed(host, self._exact) or any(listed(host[dot:], self._below) for dot in dots)


def parse_target(url: str, allowed: AllowList, *, allow_http: bool, max_chars: int) -> Target:
    """Check a URL that an image is to be fetched from.

    Raises:
        InvalidRequest: Too long, malformed, with credentials, of another scheme, or of a host that is not allowed.
    """
    if len(url) > max_chars:
        raise InvalidRequest(f"an image URL has {len(url)} characters, {max_chars} are taken")
    if not url.isascii() or any(character <= " " or character == "\\" for character in url):
        raise InvalidRequest("an image URL holds characters that must be escaped")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        raise InvalidRequest("an image URL is malformed") from None
    if parts.scheme not in (("https", "http") if allow_http else ("https",)):
        raise InvalidRequest(f"images are not fetched by {parts.scheme or 'no scheme'!r}")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("an image URL must not hold credentials")
    usual = _PORTS[parts.scheme]
    if not host or not allowed.allows(host, port or usual, usual=usual):
        raise InvalidRequest("this server does not fetch images from the host of an image URL")
    return Target(parts.scheme, host, port or usual, _path(parts))


def read_data_url(url: str, *, max_bytes: int) -> bytes:
    """What a data URL holds; its media type is ignored, content tells the type.

    Raises:
        InvalidRequest: It is none.
        PayloadTooLarge: It holds more than ``max_bytes``.
    """
    head, comma, body = url.partition(",")
    if not comma or not head[:5].lower() == "data:":
        raise InvalidRequest("a data URL has no content")
    if head.lower().endswith(";base64"):
        if len(body) // 4 * 3 > max_bytes + 3:
            raise PayloadTooLarge(f"an image has more than {max_bytes} bytes")
        data = _from_base64(body)
    else:
        data = unquote_to_bytes(body)
    if len(data) > max_bytes:
        raise PayloadTooLarge(f"an image has {len(data)} bytes, {max_bytes} are taken")
    if not data:
        raise InvalidRequest("an image is empty")
    return data


def _from_base64(body: str) -> bytes:
    packed = "".join(unquote_to_bytes(body).decode("latin-1").split()).replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("a data URL holds no base64") from None


def _path(parts: SplitResult) -> bytes:
    path = parts.path or "/"
    return (f"{path}?{parts.query}" if parts.query else path).encode()


def _host_and_port(entry: str) -> tuple[str, int | None]:
    host, colon, port = entry.rpartition(":")
    if colon and port.isdigit() and not _is_address(entry):
        entry, number = host, int(port)
    else:
        number = None
    name = entry.strip("[]").lower().rstrip(".")
    labels = name.removeprefix("*.")
    if not labels or "*" in labels or "/" in labels or "@" in labels:
        raise ValueError(f"allowed_hosts: {entry!r} is no host")
    return name, number


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
