"""When a certificate ends, as a metric: what an alert needs to come before that day."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

_UTC_TIME: Final = 0x17  # two digits of the year; the other tag has four
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0


def expires_at(file: Path) -> float:
    """Unix time at which the first certificate of a PEM file ends.

    Raises:
        ValueError: It holds none.
        OSError: It cannot be read.
    """
    text = file.read_text(encoding="ascii", errors="replace")
    end = "-----END CERTIFICATE-----"
    start = text.find("-----BEGIN CERTIFICATE-----")
    if start < 0 or end not in text:
        raise ValueError(f"{file} holds no certificate")
    der = ssl.PEM_cert_to_DER_cert(text[start : text.index(end, start) + len(end)])
    (_, certificate), *_ = _items(der)
    (_, signed), *_ = _items(certificate)
    fields = [item for item in _items(signed) if item[0] != _VERSION]
    tag, validity = fields[3]  # after serial number, algorithm and issuer (RFC 5280, 4.1)
    if tag != _SEQUENCE:
        raise ValueError(f"{file} holds no certificate")
    tag, not_after = list(_items(validity))[1]
    digits = not_after.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("20" if int(digits[:2]) < 50 else "19") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def watch_certificate(file: Path, registry: CollectorRegistry) -> None:
    """Export when the certificate ends that this process serves; read once, as the process does."""
    gauge = Gauge(
        "epdserve_router_tls_cert_expiry_timestamp_seconds",
        "When the served certificate ends",
        registry=registry,
    )
    gauge.set(expires_at(file))


def _items(der: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 2 <= len(der):
        tag, size, at = der[at], der[at + 1], at + 2
        if size & 0x80:
            width = size & 0x7F
            size, at = int.from_bytes(der[at : at + width], "big"), at + width
        yield tag, der[at : at + size]
        at += size
