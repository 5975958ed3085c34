"""What runs in the process of a ``TransferPeer``."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import signal
from multiprocessing.connection import Connection

import numpy as np
from epdserve.kvstore.transfer.nixl import NixlTransfer
from support.kv_blocks import block, region

_PR_SET_PDEATHSIG = 1


def run(connection: Connection, name: str, transports: str, count: int, page_bytes: int) -> None:
    """Serve until the connection is closed. The process ends with the fork server even while it hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["UCX_TLS"] = transports
    _Peer(connection, name, count, page_bytes).serve()


class _Peer:
    def __init__(self, connection: Connection, name: str, count: int, page_bytes: int) -> None:
        self.connection = connection
        self.pages = np.stack([block(seed, page_bytes)[1] for seed in range(count)])
        self.transfer = NixlTransfer(name)
        self.transfer.register(region("pages", self.pages))
        self.churning: int | None = None

    def serve(self) -> None:
        endpoint = self.transfer.endpoint()
        regions = [[r.name, r.address, r.stride, r.count, r.device_id] for r in endpoint.regions]
        metadata = base64.b64encode(endpoint.metadata).decode()
        self.connection.send_bytes(json.dumps([endpoint.agent, metadata, regions]).encode())
        while True:
            self.transfer.progress()
            if self.churning is not None:
                self.churning += 1
                self._fill(self.churning % len(self.pages), self.churning)
            if self.connection.poll(0.001 if self.churning is None else 0):
                try:
                    what, *numbers = json.loads(self.connection.recv_bytes())
                except EOFError:
                    return
                self._do(what, *numbers)
                self.connection.send_bytes(b"done")

    def _do(self, what: str, page: int, seed: int) -> None:
        self.churning = None
        if what == "fill":
            self._fill(page, seed)
        elif what == "tear":
            half = self.pages.shape[1] // 2
            self.pages[page, :half] = block(seed, self.pages.shape[1])[1][:half]
        elif what == "churn":
            self.churning = seed

    def _fill(self, page: int, seed: int) -> None:
        self.pages[page] = block(seed, self.pages.shape[1])[1]
