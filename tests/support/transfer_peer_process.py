"""What runs in the process of a ``TransferPeer``."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import random
import signal
from multiprocessing.connection import Connection

import numpy as np
from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import LeaseId
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
        self.dice: random.Random | None = None  # pages are recycled by chance while there is one
        self.spoiled: set[int] = set()
        self.leases = LeaseTable()

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
            if self.dice is not None:
                self._disturb(self.dice)
            if self.connection.poll(0.001 if self.churning is None else 0):
                try:
                    what, *numbers = json.loads(self.connection.recv_bytes())
                except EOFError:
                    return
                answer = self._do(what, *numbers)
                self.connection.send_bytes((answer or "done").encode())

    def _do(self, what: str, page: int, seed: int) -> str | None:
        self.churning = self.dice = None
        if what == "fill":
            self._fill(page, seed)
        elif what == "tear":
            half = self.pages.shape[1] // 2
            self.pages[page, :half] = block(seed, self.pages.shape[1])[1][:half]
        elif what == "churn":
            self.churning = seed
        elif what == "lease":
            return self.leases.grant(seed / 1000, lambda: None)
        elif what == "disturb":
            self.dice = random.Random(seed)
        elif what == "settle":
            for spoiled in self.spoiled:
                self._fill(spoiled, spoiled)
            self.spoiled.clear()
        elif what == "end":
            return "held" if self.leases.end(LeaseId(f"{seed:032x}")) else "lost"
        return None

    def _disturb(self, dice: random.Random) -> None:
        """Recycle some page, or none: another valid block, half of one, or noise."""
        page, kind = dice.randrange(len(self.pages)), dice.random()
        if kind < 0.4:
            return
        self.spoiled.add(page)
        page_bytes = self.pages.shape[1]
        if kind < 0.7:
            self._fill(page, dice.randrange(1 << 20, 1 << 30))
        elif kind < 0.85:
            half = page_bytes // 2
            self.pages[page, :half] = block(dice.randrange(1 << 20, 1 << 30), page_bytes)[1][:half]
        else:
            self.pages[page] = np.frombuffer(dice.randbytes(page_bytes), np.uint8)

    def _fill(self, page: int, seed: int) -> None:
        self.pages[page] = block(seed, self.pages.shape[1])[1]
