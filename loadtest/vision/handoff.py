"""Embeddings of a large image, read over NIXL out of another process, beside a copy of as many bytes.

    python -m epdserve.loadtest.vision.handoff               starts the process that lends; prints a table
    python -m epdserve.loadtest.vision.handoff lend FILE     the other side

An image of the released model's largest span, 1,024 embeddings of 5,120 bfloat16 values, in the store and the slots
that workers use. Both sides touch their memory first; reads and copies take turns. One floor copies out of memory that
two processes share, as any hand-off on one machine must; the other within one process, which moves nothing.
"""

import base64
import json
import mmap
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.transfer.base import Copy, TransferState
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import Endpoint, RegionDescriptor
from epdserve.loadtest.kv_bench.row import Row, Target, times_s
from epdserve.services.engine.embedding_store import EmbeddingStore, gather_rows, slot_checksum
from epdserve.services.engine.image_metrics import EmbeddingMetrics
from epdserve.services.image_types import EMBEDDINGS

TOKENS: Final = 1024
HIDDEN: Final = 5120
NBYTES: Final = TOKENS * HIDDEN * 2
DIGEST: Final = b"d" * 32
_PATIENCE_S: Final = 60.0
_ROUNDS: Final = 60


def lend(shared: str) -> None:
    """Hold one image, and as many bytes in a file of shared memory, until the reader hangs up."""
    store = EmbeddingStore(
        hidden=HIDDEN,
        nbytes=2 * NBYTES,
        max_tokens=TOKENS,
        keep_s=3600.0,
        clock=SystemClock(),
        metrics=EmbeddingMetrics.unregistered(),
    )
    draw = torch.Generator().manual_seed(0)
    if not store.put(DIGEST, torch.randn(TOKENS, HIDDEN, generator=draw)):
        raise RuntimeError("the store took no image")
    mapped(shared)[:] = 1
    held = store.pin(DIGEST, TOKENS)
    assert held is not None, "it was just put"
    transfer = NixlTransfer("lender")
    transfer.register(store.pool.region)
    endpoint, region = transfer.endpoint(), store.pool.region
    told = {
        "agent": endpoint.agent,
        "metadata": base64.b64encode(endpoint.metadata).decode(),
        "region": [region.address, region.stride, region.count],
        "slots": [slot.index for slot in held.slots],
        "checksums": list(held.checksums),
    }
    print(json.dumps(told), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        transfer.progress()  # connections want an answer; reads of shared memory do not
    transfer.close()


def mapped(shared: str) -> Any:
    """The file's bytes, shared with whoever maps it."""
    with Path(shared).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), NBYTES), np.uint8)


class _Reader:
    """A prefill worker's side, without its threads."""

    def __init__(self, told: dict[str, Any], shared: str) -> None:
        self.told, self.shared = told, mapped(shared)
        address, stride, count = told["region"]
        self.pool = StagingPool(EMBEDDINGS, slot_bytes=stride, count=count)
        taken = [self.pool.acquire() for _ in told["slots"]]
        self.slots = tuple(slot for slot in taken if slot is not None)
        self.transfer = NixlTransfer("reader")
        self.transfer.register(self.pool.region)
        region = RegionDescriptor(EMBEDDINGS, address, stride, count)
        self.peer = self.transfer.connect(
            Endpoint(told["agent"], base64.b64decode(told["metadata"]), (region,))
        )
        self.used = NBYTES // len(self.slots)
        self.copies = [
            Copy(EMBEDDINGS, theirs, EMBEDDINGS, ours.index, self.used)
            for theirs, ours in zip(told["slots"], self.slots, strict=True)
        ]
        self.plain = [StagingPool("plain", slot_bytes=NBYTES, count=1) for _ in range(2)]
        acquired = [pool.acquire() for pool in self.plain]
        self.source, self.target = (
            pool.bytes_of(slot) for pool, slot in zip(self.plain, acquired, strict=True) if slot is not None
        )
        self.source[:] = 1
        self.target[:] = 2

    def read(self) -> None:
        ticket = self.transfer.read(self.peer, self.copies)
        if (state := ticket.wait(_PATIENCE_S)) is not TransferState.DONE:
            raise RuntimeError(f"the read ended as {state}: {ticket.error}")

    def verify(self) -> None:
        sums = [slot_checksum(self.pool.bytes_of(slot), self.used, DIGEST) for slot in self.slots]
        if sums != self.told["checksums"]:
            raise RuntimeError("wrong bytes were read")

    def whole(self) -> None:
        """What lies between a loan and the rows of a prompt."""
        self.read()
        self.verify()
        gather_rows(self.pool, self.slots, TOKENS, HIDDEN)

    def memcpy(self) -> None:
        np.copyto(self.target, self.source)

    def memcpy_shared(self) -> None:
        np.copyto(self.target, self.shared)


def measure() -> list[Row]:
    """Rows in GB/s.

    Raises:
        RuntimeError: The other process ended, or wrong bytes came.
    """
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        shared.truncate(NBYTES)
        read, whole, out_of_shared, within = _rates(shared.name)
    what = f"embeddings of {NBYTES / 1e6:.1f} MB over NIXL"
    return [
        Row(what, read, "GB/s", out_of_shared, "memcpy out of shared memory", Target(0.7)),
        Row(what, read, "GB/s", within, "memcpy within one process"),
        Row(f"{what}, verified and in place", whole, "GB/s", out_of_shared, "memcpy out of shared memory"),
    ]


def _rates(shared: str) -> list[float]:
    command = [sys.executable, "-P", "-m", "epdserve.loadtest.vision.handoff", "lend", shared]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        line = lender.stdout.readline()
        if not line:
            raise RuntimeError("the lender ended before it was ready")
        reader = _Reader(json.loads(line), shared)
        works = (reader.read, reader.whole, reader.memcpy_shared, reader.memcpy)
        rates = [NBYTES / taken / 1e9 for taken in times_s(*works, rounds=_ROUNDS)]
        reader.transfer.close()
        lender.stdin.close()
        lender.wait(_PATIENCE_S)
    return rates


def main() -> None:
    """Print the table."""
    print("| what | measured | floor | ratio | target |\n|---|---|---|---|---|")
    for row in measure():
        print("| " + " | ".join(row.cells()) + " |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["lend"]:
        lend(sys.argv[2])
    else:
        main()
