import threading

import numpy as np
import pytest
from epdserve.kvstore.block_header import verify_block
from epdserve.kvstore.errors import CorruptBlock, PeerLost, TransferFailed, TransferUnavailable
from epdserve.kvstore.transfer.base import Copy, TransferState
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.kvstore.types import Endpoint, MemoryRegion
from support.kv_blocks import block, region, toy_checksum

PAGE_BYTES = 4096
COPY = Copy("pages", 0, "pages", 0, PAGE_BYTES)


class Pair:
    """A reader with an empty page and a source with ``block(0)``."""

    def __init__(self) -> None:
        self.fabric = LocalFabric()
        self.header, page = block(0, PAGE_BYTES)
        self.there, self.here = page[None].copy(), np.zeros((1, PAGE_BYTES), np.uint8)
        self.source, self.reader = LocalTransfer(self.fabric, "source"), LocalTransfer(self.fabric, "reader")
        self.source.register(region("pages", self.there))
        self.reader.register(region("pages", self.here))
        self.peer = self.reader.connect(self.source.endpoint())


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_hanging_peer_leaves_the_read_pending_and_lands_late(pair: Pair) -> None:
    pair.fabric.hold("source")
    ticket = pair.reader.read(pair.peer, [COPY])
    assert ticket.wait(0.01) is TransferState.PENDING
    assert not pair.here.any()
    assert pair.reader.pending() == 1
    pair.fabric.resume("source")
    pair.reader.progress()
    assert ticket.poll() is TransferState.DONE
    assert (pair.here == pair.there).all()


def test_wait_ends_when_the_peer_moves_on(pair: Pair) -> None:
    pair.fabric.hold("source")
    ticket = pair.reader.read(pair.peer, [COPY])
    timer = threading.Timer(0.02, pair.fabric.resume, ["source"])
    timer.start()
    assert ticket.wait(10.0) is TransferState.DONE
    timer.join()


def test_a_dead_peer_fails_the_read(pair: Pair) -> None:
    pair.fabric.hold("source")
    ticket = pair.reader.read(pair.peer, [COPY])
    pair.fabric.cut("source")
    pair.fabric.resume("source")
    assert ticket.poll() is TransferState.FAILED
    assert isinstance(ticket.error, PeerLost)
    assert not pair.here.any()


def test_a_page_recycled_before_the_copy_is_refused_by_its_hash(pair: Pair) -> None:
    def recycle() -> None:
        pair.there[0] = block(1, PAGE_BYTES)[1]

    pair.fabric.before_copy = recycle
    assert pair.reader.read(pair.peer, [COPY]).poll() is TransferState.DONE
    with pytest.raises(CorruptBlock) as caught:
        verify_block(pair.here[0].data, pair.header, toy_checksum)
    assert caught.value.field == "block_hash"


def test_closing_ends_what_is_pending(pair: Pair) -> None:
    pair.fabric.hold("source")
    ticket = pair.reader.read(pair.peer, [COPY])
    pair.reader.close()
    pair.fabric.resume("source")
    assert ticket.poll() is TransferState.FAILED
    assert not pair.here.any()


def test_what_cannot_be_moved_is_refused(pair: Pair) -> None:
    with pytest.raises(TransferUnavailable, match="host memory"):
        pair.reader.register(MemoryRegion("device", 4096, 1, 1, 0))
    with pytest.raises(TransferFailed):
        pair.reader.connect(Endpoint("somebody else", pair.source.endpoint().metadata, ()))
