"""A worker without a model: pages that stores read, and a reader of stores. Its blocks follow from their names."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
from epdserve.kernels.checksum import host_checksum
from epdserve.kvstore.block_header import HEADER_BYTES, BlockHeader
from epdserve.kvstore.clock import SystemClock
from epdserve.kvstore.staging import StagingPool
from epdserve.kvstore.tails import rest_digest
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import BlockHash
from epdserve.services.engine.endpoint import from_wire, to_wire
from epdserve.services.engine.transfer_thread import ReadOutcome, TransferThread
from epdserve.services.rpc.pages import LentPages
from epdserve.services.rpc.server import RpcServer, serve_prefill
from epdserve.services.store_types import (
    CacheOwner,
    FetchedBlock,
    FoundTail,
    OffloadBlock,
    OffloadRequest,
    TailOffer,
)
from epdserve.services.types import (
    BlockRef,
    BlockUpdate,
    TailRef,
    TransferEndpoint,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
)
from support.fake_decode import worker_info
from support.fake_prefill import FakePrefill

TOKEN = "a-cluster-token-of-tests"
PAYLOAD, PAGE = 8000, 8192
TAIL_PAYLOAD, TAIL = 12000, 12288
TOKENS = 4  # of a block
OWNER = CacheOwner(b"tenant a" * 2, b"root one" * 4)
OTHER = CacheOwner(b"tenant b" * 2, b"root one" * 4)
OTHER_ROOT = CacheOwner(b"tenant a" * 2, b"root two" * 4)
GEOMETRY = {
    "block_tokens": TOKENS,
    "payload_bytes": PAYLOAD,
    "page_bytes": PAGE,
    "tail_payload_bytes": TAIL_PAYLOAD,
    "tail_bytes": TAIL,
}
CALL_S = 5.0


def name(number: int | str) -> bytes:
    """A block's hash."""
    return str(number).encode().ljust(16, b".")


def chain(label: str, count: int) -> tuple[bytes, ...]:
    """Hashes of blocks that follow one another."""
    return tuple(name(f"{label}{number}") for number in range(count))


def payload(block_hash: bytes, *, version: int = 0, nbytes: int = PAYLOAD) -> np.ndarray:
    """What a block of that name holds; ``version`` gives others."""
    return np.frombuffer(np.random.default_rng([version, *block_hash]).bytes(nbytes), np.uint8)


class FakeWorker(FakePrefill):
    """A worker's pages and slots for tails, readable by stores; and a reader of stores."""

    def __init__(self, worker: str, incarnation: str, *, pages: int = 64) -> None:
        super().__init__()
        self.worker, self.incarnation = worker, incarnation
        self.pages = StagingPool("pages", slot_bytes=PAGE, count=pages)
        self.tails = StagingPool("tails", slot_bytes=TAIL, count=8)
        self.inbox = StagingPool("inbox", slot_bytes=PAGE, count=pages)
        self.tail_inbox = StagingPool("tail_inbox", slot_bytes=TAIL, count=2)
        transfer = NixlTransfer(worker, loopback_only=True)
        for pool in (self.pages, self.tails, self.inbox, self.tail_inbox):
            transfer.register(pool.region)
        self.endpoint: TransferEndpoint = to_wire(transfer.endpoint())
        self.transfers = TransferThread(transfer, clock=SystemClock(), serves=lambda: True)
        self.server: RpcServer | None = None
        self.lends: dict[bytes, BlockRef] = {}  # blocks in pages that neighbours may borrow
        self.loans = 0
        self.keeps_promises = True
        self.page_of = [self.pages.bytes_of(self.pages.acquire() or _none()) for _ in range(pages)]
        self.tail_of = [self.tails.bytes_of(self.tails.acquire() or _none()) for _ in range(8)]
        self.read_page = [self.inbox.bytes_of(self.inbox.acquire() or _none()) for _ in range(pages)]
        self.read_tail_slot = self.tail_inbox.bytes_of(self.tail_inbox.acquire() or _none())

    async def start(self) -> None:
        self.transfers.start()
        self.server = await serve_prefill(self, token=TOKEN)

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(grace_s=0.1)
        await asyncio.to_thread(self.transfers.stop, timeout_s=5.0)

    def info(self, machine: str) -> WorkerInfo:
        assert self.server is not None
        return worker_info(
            self.worker,
            role=WorkerRole.PREFILL,
            incarnation=self.incarnation,
            address=self.server.address,
            machine=machine,
        )

    async def describe(self) -> WorkerDescription:
        return WorkerDescription(self.info(""), self.endpoint)

    async def watch_blocks(self) -> AsyncIterator[BlockUpdate]:
        yield BlockUpdate(self.incarnation, True, 0, 0, tuple(self.lends), ())
        await asyncio.Event().wait()

    async def lend_blocks(self, hashes: tuple[bytes, ...], *, exact: bool) -> LentPages:
        held = list(itertools.takewhile(lambda block_hash: block_hash in self.lends, hashes))
        refs = tuple(self.lends[block_hash] for block_hash in held)
        self.loans += bool(refs)
        return LentPages("loan" if refs else "", self.incarnation, refs)

    async def return_blocks(self, lease: str, *, incarnation: str) -> bool:
        self.loans -= 1
        return self.keeps_promises

    async def forget_blocks(self) -> int:
        count = len(self.lends)
        self.lends.clear()
        return count

    # -- giving ---------------------------------------------------------------------------------------------

    def fill(self, page: int, block_hash: bytes, *, exact: bool = True, version: int = 0) -> BlockRef:
        """Put a sealed block into a page."""
        bytes_ = payload(block_hash, version=version)
        header = BlockHeader(BlockHash(block_hash), host_checksum(bytes_.data, block_hash), PAYLOAD, exact)
        self.page_of[page][:PAYLOAD] = bytes_
        self.page_of[page][PAYLOAD : PAYLOAD + HEADER_BYTES] = np.frombuffer(header.encode(), np.uint8)
        return BlockRef(page, 1, block_hash, header.checksum, exact)

    def offer(
        self,
        hashes: Sequence[bytes],
        *,
        first_page: int = 0,
        owner: CacheOwner = OWNER,
        exact: bool = True,
        version: int = 0,
        running: bool = False,
    ) -> OffloadRequest:
        """A chain in pages, as it would be offered."""
        refs = [
            self.fill(first_page + at, block_hash, exact=exact, version=version)
            for at, block_hash in enumerate(hashes)
        ]
        parents = [None, *hashes[:-1]]
        blocks = tuple(OffloadBlock(ref, parent) for ref, parent in zip(refs, parents, strict=True))
        return OffloadRequest(self.worker, self.incarnation, owner, blocks, running)

    def offer_tail(
        self,
        parent: bytes,
        after: Sequence[int],
        *,
        slot: int = 0,
        owner: CacheOwner = OWNER,
        exact: bool = True,
    ) -> TailOffer:
        """A tail in a slot, as it would be offered."""
        rest = rest_digest(np.asarray(after, np.int32))
        identity = bytes(a ^ b for a, b in zip(parent, rest, strict=True))
        bytes_ = payload(identity, nbytes=TAIL_PAYLOAD)
        self.tail_of[slot][:TAIL_PAYLOAD] = bytes_
        ref = TailRef(slot, 1, TAIL, host_checksum(bytes_.data, identity), exact)
        return TailOffer(self.worker, self.incarnation, owner, ref, identity, parent, len(after), rest)

    # -- taking ---------------------------------------------------------------------------------------------

    async def read(self, endpoint: TransferEndpoint, blocks: Sequence[FetchedBlock]) -> bool:
        """Pull lent blocks; whether every one is what its name promises, to the bit."""
        copies = [Copy("blocks", block.ref.page, "inbox", at, PAGE) for at, block in enumerate(blocks)]
        read = self.transfers.read(from_wire(endpoint), copies, deadline_s=CALL_S)
        assert await asyncio.wrap_future(read.future) is ReadOutcome.DONE
        return all(
            np.array_equal(self.read_page[at][:PAYLOAD], payload(block.ref.block_hash))
            and host_checksum(self.read_page[at][:PAYLOAD].data, block.ref.block_hash) == block.ref.checksum
            for at, block in enumerate(blocks)
        )

    async def wrong(
        self, endpoint: TransferEndpoint, blocks: Sequence[FetchedBlock], places: Sequence[int]
    ) -> list[bytes]:
        """Pull lent blocks into ``places``, one after the other; names of those that hold something else."""
        copies = [
            Copy("blocks", block.ref.page, "inbox", at, PAGE)
            for block, at in zip(blocks, places, strict=False)
        ]
        read = self.transfers.read(from_wire(endpoint), copies, deadline_s=CALL_S)
        assert await asyncio.wrap_future(read.future) is ReadOutcome.DONE
        return [
            block.ref.block_hash
            for block, at in zip(blocks, places, strict=False)
            if not np.array_equal(self.read_page[at][:PAYLOAD], payload(block.ref.block_hash))
        ]

    async def read_tail(self, endpoint: TransferEndpoint, found: FoundTail) -> bool:
        """Pull a lent tail; whether it is what its identity promises."""
        copy = Copy("tails", found.tail.slot, "tail_inbox", 0, TAIL)
        read = self.transfers.read(from_wire(endpoint), [copy], deadline_s=CALL_S)
        assert await asyncio.wrap_future(read.future) is ReadOutcome.DONE
        wanted = payload(found.identity, nbytes=TAIL_PAYLOAD)
        return np.array_equal(self.read_tail_slot[:TAIL_PAYLOAD], wanted)


def _none() -> Any:
    raise AssertionError("a fresh pool has slots")
