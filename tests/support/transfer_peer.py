"""A process that offers blocks over NIXL, for tests that stop it, kill it or change its pages under a reader."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epdserve.kvstore.types import Endpoint, RegionDescriptor
from support.transfer_peer_process import run

ANY_TRANSPORT, TCP_ONLY = "all", "tcp,self"
_PATIENCE_S = 60.0  # the first peer waits for imports, on a machine under load

_context = multiprocessing.get_context("forkserver")
# Two seconds of every peer's start otherwise. The fork server of Python 3.11 finds installed modules only.
_context.set_forkserver_preload(["nixl._api", "epdserve.kvstore.transfer.nixl"])
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # read when nixl is imported, which is in the fork server


class TransferPeer:
    """A running peer. Its page ``i`` holds ``block(i)`` at first."""

    def __init__(self, name: str, transports: str, pages: int, page_bytes: int) -> None:
        self._connection, theirs = _context.Pipe()
        arguments = (theirs, name, transports, pages, page_bytes)
        self._process = _context.Process(target=run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        agent, metadata, regions = json.loads(self._answer())
        descriptors = tuple(RegionDescriptor(*fields) for fields in regions)
        self.endpoint = Endpoint(agent, base64.b64decode(metadata), descriptors)

    def fill(self, page: int, seed: int) -> None:
        """Recycle a page: it holds ``block(seed)`` from now on."""
        self._ask("fill", page, seed)

    def tear(self, page: int, seed: int) -> None:
        """Put the first half of ``block(seed)`` into a page and leave the rest, header too."""
        self._ask("tear", page, seed)

    def churn(self, first_seed: int) -> None:
        """Recycle all pages over and over, until the next request."""
        self._ask("churn", 0, first_seed)

    def lease(self, ttl_s: float) -> str:
        """A promise that pages keep their bytes for ``ttl_s``; whether it is kept is another matter."""
        return self._ask("lease", 0, round(ttl_s * 1000))

    def end_lease(self, lease: str) -> bool:
        """Whether the lease still held. Ends ``disturb``, as every request does."""
        return self._ask("end", 0, int(lease, 16)) == "held"

    def disturb(self, seed: int) -> None:
        """Recycle pages at random from now on, whatever was promised: other blocks, halves, noise."""
        self._ask("disturb", 0, seed)

    def settle(self) -> None:
        """Let every page hold what it held at first again."""
        self._ask("settle", 0, 0)

    def freeze(self) -> None:
        """Let the process hang."""
        os.kill(self._pid, signal.SIGSTOP)
        state = Path(f"/proc/{self._pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        """End ``freeze``."""
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the process without a goodbye, hanging or not."""
        self._process.kill()
        self._process.join(_PATIENCE_S)
        self._connection.close()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _ask(self, what: str, page: int, seed: int) -> str:
        self._connection.send_bytes(json.dumps([what, page, seed]).encode())
        return self._answer().decode()

    def _answer(self) -> bytes:
        if not self._connection.poll(_PATIENCE_S):
            raise TimeoutError(f"peer {self._pid} does not answer")
        return self._connection.recv_bytes()


@contextmanager
def transfer_peer(
    name: str, *, transports: str, pages: int = 8, page_bytes: int = 65536
) -> Iterator[TransferPeer]:
    """Start a peer process, and end it."""
    peer = TransferPeer(name, transports, pages, page_bytes)
    try:
        yield peer
    finally:
        peer.kill()
