"""Reads over NIXL between two processes, against copies of the same bytes over the same medium.

UCX picks its transports when it is loaded, so each transport is measured in a reader process of its own:

    python -m epdserve.loadtest.kv_bench.nixl read SHARED_FILE     prints figures as JSON
    python -m epdserve.loadtest.kv_bench.nixl offer SHARED_FILE    what the reader reads; started by it
"""

import base64
import functools
import json
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.transfer.base import Copy, TransferState
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import Endpoint, MemoryRegion, RegionDescriptor
from epdserve.loadtest.kv_bench.row import BLOCK_BYTES, Row, Rows, Target, times_s

_MODULE: Final = "epdserve.loadtest.kv_bench.nixl"
_PATIENCE_S: Final = 120.0
_BLOCKS: Final = 512  # 56 MiB: beyond the caches
_MEBI: Final = 1 << 20
_ROUNDS: Final = 9


def measure() -> Rows:
    """Shared memory, then TCP."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        shared.truncate(_BLOCKS * BLOCK_BYTES)
        here = _figures(shared.name, "")
        there = _figures(shared.name, "tcp,self")
    name = "memcpy from shared memory"
    for what, key, least in (
        ("1 MiB a read", "mebi", 0.8),
        (f"{_BLOCKS * BLOCK_BYTES // _MEBI} MiB a read", "contiguous", 0.8),
        (f"{_BLOCKS} blocks, scattered", "scattered", 0.4),
    ):
        yield Row(
            f"NIXL between processes, {what}",
            here[key],
            "GB/s",
            here["memcpy_" + key],
            name,
            Target(least),
        )
    for what, key, target in (
        ("contiguous", "contiguous", Target(0.85)),
        ("blocks, scattered", "scattered", None),
    ):
        yield Row(
            f"NIXL over TCP, {what}", there[key], "GB/s", there["socket"], "a socket pair, blocking", target
        )
    bare = "NIXL alone, one request made beforehand"
    yield Row("the same, contiguous, beside NIXL alone", there["contiguous"], "GB/s", there["bare"], bare)
    yield Row("NIXL over TCP, 1 MiB a read", there["mebi"], "GB/s", there["bare"], bare)


def _figures(shared: str, transports: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("UCX_TLS", None)
    if transports:
        environment["UCX_TLS"] = transports
    run = subprocess.run(
        [sys.executable, "-m", _MODULE, "read", shared],
        env=environment,
        stdout=subprocess.PIPE,
        timeout=_PATIENCE_S,
        check=True,
    )
    figures: dict[str, float] = json.loads(run.stdout)
    return figures


def offer(shared: str) -> None:
    """Offer the file's bytes, and the same through a socket for every byte that comes, until the reader hangs up."""
    memory, pool = _mapped(shared), StagingPool("blocks", slot_bytes=BLOCK_BYTES, count=_BLOCKS)
    memory[:] = np.arange(memory.size, dtype=np.uint32).astype(np.uint8)
    for block in memory.reshape(_BLOCKS, BLOCK_BYTES):
        slot = pool.acquire()
        assert slot is not None, "a new pool has a slot for each block"
        pool.bytes_of(slot)[:] = block
    transfer = NixlTransfer("offer")
    transfer.register(pool.region)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = transfer.endpoint()
        metadata = base64.b64encode(endpoint.metadata).decode()
        print(
            json.dumps([endpoint.agent, metadata, pool.region.address, server.getsockname()[1]]), flush=True
        )
        connection, _ = server.accept()
    # TCP stands still between two polls; shared memory needs none, and a busy source would take the reader's core
    pause_s = 0.0 if os.environ.get("UCX_TLS") else 0.001
    with connection:
        connection.settimeout(_PATIENCE_S)
        while True:
            transfer.progress()
            if select.select([connection], [], [], pause_s)[0]:
                if not connection.recv(1):
                    break
                connection.sendall(memory.data)
    transfer.close()


class _Reader:
    def __init__(self, shared: str, source: "subprocess.Popen[bytes]") -> None:
        assert source.stdout is not None
        agent, metadata, address, port = json.loads(_line(source.stdout))
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
        self.shared = _mapped(shared)
        self.pool = StagingPool("pages", slot_bytes=BLOCK_BYTES, count=_BLOCKS)
        self.slots = [slot for _ in range(_BLOCKS) if (slot := self.pool.acquire()) is not None]
        self.pages = [self.pool.bytes_of(slot) for slot in self.slots]
        self.plain = StagingPool("target", slot_bytes=self.shared.size, count=1)
        slot = self.plain.acquire()
        assert slot is not None, "a new pool has a slot"
        self.target = self.plain.bytes_of(slot)
        self.transfer = NixlTransfer("reader")
        self.transfer.register(self.pool.region)
        region = RegionDescriptor("blocks", address, BLOCK_BYTES, _BLOCKS)
        # the same memory again in places of one mebibyte
        mebis = self.shared.size // _MEBI
        large = RegionDescriptor("mebis", address, _MEBI, mebis)
        self.transfer.register(MemoryRegion("mebis", self.target.ctypes.data, _MEBI, mebis))
        self.peer = self.transfer.connect(Endpoint(agent, base64.b64decode(metadata), (region, large)))
        self.mebis, self.remote = mebis, address
        dice = np.random.default_rng(0)
        self.order = dice.permutation(_BLOCKS).tolist()

    def read(self, copies: list[Copy]) -> None:
        ticket = self.transfer.read(self.peer, copies)
        state = ticket.wait(_PATIENCE_S)
        if state is not TransferState.DONE:
            raise RuntimeError(f"read ended as {state}: {ticket.error}")

    def scattered(self) -> None:
        self.read(
            [Copy("blocks", there, "pages", here, BLOCK_BYTES) for here, there in enumerate(self.order)]
        )

    def contiguous(self) -> None:
        self.read([Copy("mebis", i, "mebis", i, _MEBI) for i in range(self.mebis)])

    def mebi(self) -> None:
        for i in range(self.mebis):
            self.read([Copy("mebis", i, "mebis", i, _MEBI)])

    def bare(self) -> None:
        """The same bytes through NIXL without our layer: one request, posted again, polled without a pause."""
        agent, request = self.transfer.native, self._bare_request()
        give_up_at = time.monotonic() + _PATIENCE_S
        state = agent.transfer(request)
        while state == "PROC" and time.monotonic() < give_up_at:
            state = agent.check_xfer_state(request)
        if state != "DONE":
            raise RuntimeError(f"bare read ended as {state}")

    @functools.cache  # noqa: B019 - one reader a process
    def _bare_request(self) -> Any:
        agent, nbytes = self.transfer.native, self.mebis * _MEBI
        here = np.array([[self.target.ctypes.data, nbytes, 0]], np.uint64)
        there = np.array([[self.remote, nbytes, 0]], np.uint64)
        local, remote = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")
        return agent.initialize_xfer("READ", local, remote, str(self.peer))

    def socket(self) -> None:
        """The same bytes through a blocking connection into the same memory."""
        self.connection.sendall(b"!")
        view, done = self.target.data, 0
        while done < len(view):
            got = self.connection.recv_into(view[done:])
            if not got:
                raise RuntimeError("the other side closed its socket")
            done += got

    def memcpy_scattered(self) -> None:
        blocks = self.shared.reshape(_BLOCKS, BLOCK_BYTES)
        for here, there in enumerate(self.order):
            np.copyto(self.pages[here], blocks[there])

    def memcpy_contiguous(self) -> None:
        nbytes = self.mebis * _MEBI
        np.copyto(self.target[:nbytes], self.shared[:nbytes])

    def memcpy_mebi(self) -> None:
        for at in range(0, self.mebis * _MEBI, _MEBI):
            np.copyto(self.target[at : at + _MEBI], self.shared[at : at + _MEBI])

    def check(self) -> None:
        """What was read last, by ``contiguous`` and by ``scattered``."""
        blocks = self.shared.reshape(_BLOCKS, BLOCK_BYTES)
        sound = np.array_equal(self.target[: self.mebis * _MEBI], self.shared[: self.mebis * _MEBI])
        for page, there in zip(self.pages, self.order, strict=True):
            sound = sound and np.array_equal(page, blocks[there])
        if not sound:
            raise RuntimeError("wrong bytes were read")


def read(shared: str) -> dict[str, float]:
    """Figures in GB/s of this process's transport, floors among them."""
    source = subprocess.Popen(
        [sys.executable, "-m", _MODULE, "offer", shared], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        reader = _Reader(shared, source)
        kinds = ("contiguous", "scattered", "mebi")
        floors = (
            ("socket", "bare") if os.environ.get("UCX_TLS") else tuple("memcpy_" + kind for kind in kinds)
        )
        works: dict[str, Callable[[], object]] = {key: getattr(reader, key) for key in (*kinds, *floors)}
        figures: dict[str, float] = {}
        seconds = times_s(*works.values(), rounds=_ROUNDS)
        for key, taken in zip(works, seconds, strict=True):
            whole = key == "socket" or key.endswith("scattered")
            nbytes = reader.shared.size if whole else reader.mebis * _MEBI
            figures[key] = float(nbytes) / taken / 1e9
        reader.target[:] = 0
        reader.contiguous()
        reader.check()
        reader.transfer.close()
        return figures
    finally:
        source.kill()
        source.wait(_PATIENCE_S)


def _mapped(shared: str) -> Any:
    with Path(shared).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


def _line(stream: IO[bytes]) -> bytes:
    line = stream.readline()
    if not line:
        raise RuntimeError("the other process ended before it was ready")
    return line


if __name__ == "__main__":
    role, shared_file = sys.argv[1:]
    if role == "offer":
        offer(shared_file)
    else:
        print(json.dumps(read(shared_file)))
