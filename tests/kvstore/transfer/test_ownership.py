"""Pages recycled at random moments of real NIXL transfers between two processes, one of which stops and dies."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numpy as np
import pytest
from epdserve.kvstore.block_header import BlockHeader, verify_block
from epdserve.kvstore.blocks import BlockManager
from epdserve.kvstore.errors import CorruptBlock, OutOfPages, TransferFailed
from epdserve.kvstore.transfer.base import Copy, TransferState, TransferTicket
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import PageId, PeerId
from support.kv_blocks import block, region, toy_checksum
from support.transfer_peer import ANY_TRANSPORT, TCP_ONLY, TransferPeer

SOURCE_PAGES, TARGET_PAGES, PAGE_BYTES = 24, 96, 65536
LEASE_S, DEADLINE_S, PATIENCE_S = 0.3, 0.15, 20.0


class Reader:
    """Pulls all pages of a peer, believes what it can prove, and looks afterwards at what others would believe."""

    def __init__(self, transports: str, seed: int) -> None:
        self.dice = random.Random(seed)
        self.transports = transports
        self.promised = [block(page, PAGE_BYTES) for page in range(SOURCE_PAGES)]
        self.pages = np.zeros((TARGET_PAGES, PAGE_BYTES), np.uint8)
        self.blocks = BlockManager(TARGET_PAGES)
        self.transfer = NixlTransfer("reader")
        self.transfer.register(region("pages", self.pages))
        self.late: list[tuple[TransferTicket, list[PageId]]] = []
        self.kept: dict[PageId, bytes] = {}
        self.seen: Counter[str] = Counter()
        self.peer, self.peer_id = self._meet()

    def turn(self, number: int) -> None:
        """One hand-off under one kind of disturbance."""
        fault = self.dice.choices(["none", "stop", "hang", "kill"], [50, 25, 15, 10])[0]
        self.peer.settle()
        lease, ends_at = self.peer.lease(LEASE_S), time.monotonic() + LEASE_S
        pages = self._reserve()
        if fault != "none" or self.dice.random() < 0.8:
            self.peer.disturb(number)
        trouble = threading.Thread(
            target=self._trouble, args=(fault, self.dice.choice([0.0, self.dice.uniform(0, 0.003)]))
        )
        trouble.start()
        places = self.dice.sample(range(SOURCE_PAGES), SOURCE_PAGES)
        copies = [
            Copy("pages", there, "pages", here, PAGE_BYTES) for there, here in zip(places, pages, strict=True)
        ]
        try:
            ticket = self.transfer.read(self.peer_id, copies)
            state = ticket.wait(DEADLINE_S)
        except TransferFailed:
            state = TransferState.FAILED
        in_time = time.monotonic() < ends_at
        trouble.join()
        if fault == "kill":
            self.peer, self.peer_id = self._meet()
            held = False
        else:
            self.peer.thaw()
            held = self.peer.end_lease(lease)
        self.seen[state.value] += 1
        if state is TransferState.PENDING:
            self.blocks.quarantine(pages)
            self.late.append((ticket, pages))
        elif state is TransferState.FAILED:
            self.blocks.abort(pages)
        else:
            self._judge(places, pages, held=held, in_time=in_time)
        self._collect()

    def finish(self) -> None:
        """Every late write lands, and every page is accounted for."""
        give_up_at = time.monotonic() + PATIENCE_S
        while self.late and time.monotonic() < give_up_at:
            self._collect()
            time.sleep(0.001)
        assert not self.late
        self._look_after_kept(list(self.kept))
        self.blocks.check()
        self.transfer.close()
        self.peer.kill()

    def _meet(self) -> tuple[TransferPeer, PeerId]:
        peer = TransferPeer("peer", self.transports, SOURCE_PAGES, PAGE_BYTES)
        return peer, self.transfer.connect(peer.endpoint)

    def _trouble(self, fault: str, delay_s: float) -> None:
        time.sleep(delay_s)
        if fault == "kill":
            self.peer.kill()
        elif fault in ("stop", "hang"):
            self.peer.freeze()
            time.sleep(0.01 if fault == "stop" else DEADLINE_S + 0.05)
            if fault == "stop":
                self.peer.thaw()

    def _reserve(self) -> list[PageId]:
        while True:
            try:
                pages = self.blocks.reserve(SOURCE_PAGES)
            except OutOfPages:  # held by late transfers
                self._collect()
                time.sleep(0.001)
                continue
            self._look_after_kept(pages)
            return pages

    def _judge(self, places: list[int], pages: list[PageId], *, held: bool, in_time: bool) -> None:
        for place, page in zip(places, pages, strict=True):
            header, promised = self.promised[place]
            wrong = not np.array_equal(self.pages[page], promised)
            sound = self._sound(page, header)
            self.seen["pages read"] += 1
            self.seen["wrong"] += wrong
            self.seen["wrong, lease by the reader's clock"] += wrong and in_time
            self.seen["wrong, lease by its owner's word"] += wrong and held
            if not (sound and held):
                self.blocks.abort([page])
                continue
            self.seen["accepted"] += 1
            self.seen["accepted wrong"] += wrong
            name, checksum = header.block_hash, header.checksum
            kept = self.blocks.seal(page, name, parent=None, exact=True, checksum=checksum)
            if kept == page:
                self.kept[page] = self.pages[page].tobytes()
            self.blocks.release([kept])

    def _sound(self, page: PageId, header: BlockHeader) -> bool:
        try:
            verify_block(self.pages[page].data, header, toy_checksum)
        except CorruptBlock:
            return False
        return True

    def _collect(self) -> None:
        waiting = []
        for ticket, pages in self.late:
            if ticket.poll() is TransferState.PENDING:
                waiting.append((ticket, pages))
                continue
            self.seen["landed late"] += ticket.poll() is TransferState.DONE
            self.blocks.transfer_over(pages)
        self.late = waiting

    def _look_after_kept(self, pages: list[PageId]) -> None:
        for page in pages:
            kept = self.kept.pop(page, None)
            self.seen["spoiled later"] += kept is not None and self.pages[page].tobytes() != kept


def run(transports: str, seed: int, turns: int) -> Counter[str]:
    reader = Reader(transports, seed)
    for number in range(turns):
        reader.turn(number)
    reader.finish()
    assert reader.seen["accepted wrong"] == 0
    assert reader.seen["spoiled later"] == 0
    return reader.seen


@pytest.mark.parametrize("transports", [ANY_TRANSPORT, TCP_ONLY], ids=["shm", "tcp"])
def test_no_wrong_byte_is_accepted(
    transports: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    seen = run(transports, seed=1, turns=20)
    with capsys.disabled():
        print(f"\n{transports}: {dict(sorted(seen.items()))}")
    assert seen["accepted"] > 0
    assert seen["wrong"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("transports", [ANY_TRANSPORT, TCP_ONLY], ids=["shm", "tcp"])
def test_no_wrong_byte_is_accepted_in_a_thousand_hand_offs(
    transports: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    seen = run(transports, seed=2, turns=1000)
    with capsys.disabled():
        print(f"\n{transports}: {dict(sorted(seen.items()))}")
