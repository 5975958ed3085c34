"""The contract of ``Transfer``, run against every implementation, within a process and between two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from epdserve.kvstore.errors import TransferFailed, TransferUnavailable, UnknownPeer
from epdserve.kvstore.transfer.base import Copy, Transfer, TransferState, TransferTicket
from epdserve.kvstore.transfer.local import LocalFabric, LocalTransfer
from epdserve.kvstore.transfer.nixl import NixlTransfer
from epdserve.kvstore.types import Endpoint, PeerId
from support.kv_blocks import Bytes, block, region
from support.transfer_peer import ANY_TRANSPORT, TCP_ONLY, transfer_peer

PAGES, PAGE_BYTES = 8, 65536
PATIENCE_S = 20.0  # a machine under load


@dataclass
class Net:
    """A reader with empty pages, and a source whose page ``i`` holds ``block(i)``."""

    make: Callable[[str], Transfer]
    reader: Transfer
    endpoint: Endpoint
    sources: list[Transfer] = field(default_factory=list)  # those in this process, which must be polled
    kept: list[Bytes] = field(default_factory=list)
    pages: Bytes = field(default_factory=lambda: np.zeros((PAGES, PAGE_BYTES), np.uint8))

    def add_source(self, name: str, first_seed: int = 0) -> Endpoint:
        pages = np.stack([block(first_seed + page, PAGE_BYTES)[1] for page in range(PAGES)])
        source = self.make(name)
        source.register(region("pages", pages))
        self.sources.append(source)
        self.kept.append(pages)
        return source.endpoint()

    def finish(self, ticket: TransferTicket) -> TransferState:
        gives_up_at = time.monotonic() + PATIENCE_S
        while ticket.wait(0.001) is TransferState.PENDING and time.monotonic() < gives_up_at:
            for source in self.sources:
                source.progress()
        return ticket.poll()

    def read(self, peer: PeerId, *pairs: tuple[int, int]) -> TransferState:
        return self.finish(self.reader.read(peer, [copy(*pair) for pair in pairs]))


def copy(remote: int, local: int, nbytes: int = PAGE_BYTES) -> Copy:
    return Copy("pages", remote, "pages", local, nbytes)


def content(seed: int) -> Bytes:
    return block(seed, PAGE_BYTES)[1]


@pytest.fixture(scope="module")
def peers() -> Iterator[Callable[[str], Endpoint]]:
    """Peer processes by transport, started once each."""
    running: dict[str, Endpoint] = {}
    with ExitStack() as stack:

        def start(transports: str) -> Endpoint:
            if transports not in running:
                peer = stack.enter_context(
                    transfer_peer("peer", transports=transports, pages=PAGES, page_bytes=PAGE_BYTES)
                )
                running[transports] = peer.endpoint
            return running[transports]

        yield start


@pytest.fixture(params=["local", "nixl", "nixl-shm-process", "nixl-tcp-process"])
def net(
    request: pytest.FixtureRequest, peers: Callable[[str], Endpoint], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Net]:
    kind: str = request.param
    transports = TCP_ONLY if "tcp" in kind else ANY_TRANSPORT
    monkeypatch.setenv("UCX_TLS", transports)
    fabric = LocalFabric()

    def make(name: str) -> Transfer:
        return LocalTransfer(fabric, name) if kind == "local" else NixlTransfer(name)

    net = Net(make, make("reader"), Endpoint("", b"", ()))
    net.endpoint = peers(transports) if kind.endswith("process") else net.add_source("source")
    net.reader.register(region("pages", net.pages))
    yield net
    net.reader.close()
    for source in net.sources:
        source.close()


class TestTransfer:
    def test_bytes_arrive_where_they_were_asked_for_and_nowhere_else(self, net: Net) -> None:
        peer = net.reader.connect(net.endpoint)
        ticket = net.reader.read(peer, [copy(1, 6), copy(2, 7), copy(5, 0), copy(3, 2, 100)])
        assert net.finish(ticket) is TransferState.DONE
        assert ticket.error is None
        expected = np.zeros_like(net.pages)
        for remote, local, nbytes in (
            (1, 6, PAGE_BYTES),
            (2, 7, PAGE_BYTES),
            (5, 0, PAGE_BYTES),
            (3, 2, 100),
        ):
            expected[local, :nbytes] = content(remote)[:nbytes]
        assert (net.pages == expected).all()

    def test_a_peer_can_be_read_many_times(self, net: Net) -> None:
        peer = net.reader.connect(net.endpoint)
        for turn in range(20):
            assert net.read(peer, (turn % PAGES, (turn * 3) % PAGES)) is TransferState.DONE
            assert (net.pages[(turn * 3) % PAGES] == content(turn % PAGES)).all()

    def test_a_read_of_nothing_is_done_at_once(self, net: Net) -> None:
        assert net.reader.read(net.reader.connect(net.endpoint), []).poll() is TransferState.DONE

    def test_connecting_again_gives_the_same_peer(self, net: Net) -> None:
        first = net.reader.connect(net.endpoint)
        assert net.reader.connect(net.endpoint) == first
        assert net.read(first, (0, 0)) is TransferState.DONE

    def test_places_that_do_not_exist_are_refused(self, net: Net) -> None:
        peer = net.reader.connect(net.endpoint)
        for wrong in (
            [copy(PAGES, 0)],
            [copy(0, PAGES)],
            [copy(-1, 0)],
            [copy(0, 0, PAGE_BYTES + 1)],
            [copy(0, 0, 0)],
            [Copy("other", 0, "pages", 0, 1)],
            [Copy("pages", 0, "other", 0, 1)],
            [copy(0, 0), copy(1, 0)],
        ):
            with pytest.raises(ValueError, match=r"region|two copies"):
                net.reader.read(peer, wrong)
        assert not net.pages.any()

    def test_a_forgotten_peer_is_unknown_until_it_is_met_again(self, net: Net) -> None:
        peer = net.reader.connect(net.endpoint)
        assert net.read(peer, (1, 1)) is TransferState.DONE
        net.reader.forget(peer)
        net.reader.forget(peer)
        with pytest.raises(UnknownPeer):
            net.reader.read(peer, [copy(0, 0)])
        with pytest.raises(UnknownPeer):
            net.reader.read(PeerId("never met"), [copy(0, 0)])
        assert net.read(net.reader.connect(net.endpoint), (2, 2)) is TransferState.DONE
        assert (net.pages[2] == content(2)).all()

    def test_metadata_that_means_nothing_is_refused(self, net: Net) -> None:
        for metadata in (b"", b"nonsense", net.endpoint.metadata[: len(net.endpoint.metadata) // 2]):
            with pytest.raises(TransferFailed):
                net.reader.connect(Endpoint("stranger", metadata, net.endpoint.regions))
        assert net.read(net.reader.connect(net.endpoint), (0, 0)) is TransferState.DONE

    def test_a_region_is_registered_once(self, net: Net) -> None:
        with pytest.raises(ValueError, match="registered already"):
            net.reader.register(region("pages", net.pages))

    def test_threads_may_read_at_the_same_time(self, net: Net) -> None:
        peer = net.reader.connect(net.endpoint)
        assert (
            net.read(peer, (0, 0)) is TransferState.DONE
        )  # polls sources of this process until they are met

        def work(page: int) -> TransferState:
            for _ in range(10):
                state = net.finish(net.reader.read(peer, [copy(page, page)]))
            return state

        with ThreadPoolExecutor(4) as threads:
            assert set(threads.map(work, range(PAGES))) == {TransferState.DONE}
        assert all((net.pages[page] == content(page)).all() for page in range(PAGES))

    def test_a_closed_transfer_does_nothing_any_more(self, net: Net) -> None:
        peer = net.reader.connect(net.endpoint)
        assert net.read(peer, (0, 0)) is TransferState.DONE
        net.reader.close()
        net.reader.close()
        with pytest.raises(TransferUnavailable):
            net.reader.read(peer, [copy(0, 0)])
        with pytest.raises(TransferUnavailable):
            net.reader.progress()


@pytest.mark.parametrize("net", ["local", "nixl"], indirect=True)
class TestTransferWithinAProcess:
    def test_a_restarted_peer_is_a_new_one_and_the_old_one_is_forgotten(self, net: Net) -> None:
        old = net.reader.connect(net.endpoint)
        assert net.read(old, (1, 1)) is TransferState.DONE
        net.sources.pop().close()
        new = net.reader.connect(net.add_source("source", first_seed=100))
        assert new != old
        with pytest.raises(UnknownPeer):
            net.reader.read(old, [copy(1, 1)])
        assert net.read(new, (1, 1)) is TransferState.DONE
        assert (net.pages[1] == content(101)).all()

    def test_a_region_registered_later_is_found_with_the_new_endpoint(self, net: Net) -> None:
        peer = net.reader.connect(net.endpoint)
        assert net.read(peer, (1, 1)) is TransferState.DONE
        tails = np.full((2, 512), 7, np.uint8)
        net.sources[0].register(region("tails", tails))
        assert net.reader.connect(net.sources[0].endpoint()) == peer
        ticket = net.reader.read(peer, [Copy("tails", 1, "pages", 3, 512), copy(2, 2)])
        assert net.finish(ticket) is TransferState.DONE
        assert (net.pages[3, :512] == 7).all()
        assert (net.pages[2] == content(2)).all()
