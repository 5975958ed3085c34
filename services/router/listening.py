"""Listening sockets: made here, or lent by whoever started the process."""

from __future__ import annotations

import errno
import socket
from typing import Final

from epdserve.services.errors import Unavailable

BACKLOG: Final = 2048


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
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def inherited(descriptor: int) -> socket.socket:
    """The listening socket that whoever started this process holds.

    Raises:
        OSError: It is none.
    """
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    return sock
