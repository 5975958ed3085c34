"""Which addresses a fetch may reach: those of the public network, and nothing that is or hides one of ours."""

from __future__ import annotations

import ipaddress
from typing import Final

_NAT64: Final = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))
_COMPATIBLE: Final = ipaddress.IPv6Network("::/96")  # IPv4-compatible, long out of use


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public network; False for what is no address.

    An IPv6 address that carries an IPv4 one (mapped, 6to4, Teredo, NAT64) is judged by what it carries, too.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return _is_global(parsed)
    return all(map(_is_global, _carried(parsed))) and all(map(_is_global, _itself(parsed)))


def _is_global(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback
    )


def _itself(address: ipaddress.IPv6Address) -> tuple[ipaddress.IPv6Address, ...]:
    """Nothing for an address that is an IPv4 one in disguise: what it carries decides."""
    if address.ipv4_mapped is not None or any(address in network for network in _NAT64):
        return ()
    return (address,)


def _carried(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    carried = []
    if address.ipv4_mapped is not None:
        carried.append(address.ipv4_mapped)
    if address.sixtofour is not None:
        carried.append(address.sixtofour)
    if address.teredo is not None:
        carried.extend(address.teredo)
    if address in _COMPATIBLE or any(address in network for network in _NAT64):
        carried.append(ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF))
    return carried
