"""A second network namespace beside this one, and the cable between them, which can be cut. Needs root and iproute2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

_COMMAND_S: Final = 10.0
_OURS, _THEIRS, _BITS = "10.213.77.1", "10.213.77.2", 30


@dataclass(frozen=True, slots=True)
class Network:
    """Addresses of the two sides, and how to start a process on the other one.

    Attributes:
        enter: Words before a command that make it run apart.
        environment: For workers: bytes must take the cable too, not shared memory.
        cable: Name of our end.
    """

    host: str = "127.0.0.1"
    host_apart: str = "127.0.0.1"
    enter: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cable: str = ""

    def cut(self, cut: bool) -> None:
        """Pull the cable, or plug it in again.

        Raises:
            RuntimeError: The kernel does not let us.
        """
        _ip("link", "set", self.cable, "down" if cut else "up")


ALONE: Final = Network()


@contextmanager
def two_namespaces() -> Iterator[Network]:
    """A namespace that is gone when the block ends.

    Raises:
        RuntimeError: The kernel does not let us, or there is no ``ip``.
    """
    name = f"epdserve-{os.getpid()}"
    cable, other = f"epd{os.getpid() % 100000}a", f"epd{os.getpid() % 100000}b"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", cable, "type", "veth", "peer", "name", other, "netns", name)
        _ip("addr", "add", f"{_OURS}/{_BITS}", "dev", cable)
        _ip("link", "set", cable, "up")
        _ip("-n", name, "addr", "add", f"{_THEIRS}/{_BITS}", "dev", other)
        _ip("-n", name, "link", "set", other, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        environment = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": f"{cable},{other},lo"}
        yield Network(_OURS, _THEIRS, ("ip", "netns", "exec", name), environment, cable)
    finally:
        _ip("netns", "del", name)  # the cable goes with it


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_COMMAND_S)
    except FileNotFoundError:
        raise RuntimeError("ip is missing: apt-get install iproute2") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"ip {' '.join(words)}: {error.stderr.strip()}") from None
