"""Transfer within one process, for tests and for all roles in one process. Copies with ``memmove``.

A ``LocalFabric`` stands for the network: transfers find one another through it, and tests hold it up, cut it, or
step in before a copy.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from epdserve.kvstore.errors import PeerLost, TransferFailed, TransferUnavailable, UnknownPeer
from epdserve.kvstore.metrics import TransferMetrics
from epdserve.kvstore.transfer.base import Copy, TransferState
from epdserve.kvstore.transfer.plan import Spans, coalesce, resolve
from epdserve.kvstore.types import HOST_MEMORY, Endpoint, MemoryRegion, PeerId


class LocalFabric:
    """The wire between the transfers of one process, with faults on demand. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._alive: set[str] = set()
        self._held: set[str] = set()
        self.before_copy: Callable[[], None] | None = None  # runs once in front of each read's bytes

    def join(self, peer: str) -> None:
        """A transfer came up."""
        with self.changed:
            self._alive.add(peer)

    def cut(self, agent: str) -> None:
        """Let every incarnation of ``agent`` be dead: its reads fail."""
        with self.changed:
            self._alive = {peer for peer in self._alive if _agent_of(peer) != agent}
            self.changed.notify_all()

    def hold(self, agent: str) -> None:
        """Let ``agent`` hang: reads from it stay PENDING."""
        with self.changed:
            self._held.add(agent)

    def resume(self, agent: str) -> None:
        """End ``hold``: the bytes land now, however late."""
        with self.changed:
            self._held.discard(agent)
            self.changed.notify_all()

    def alive(self, peer: str) -> bool:
        """Is this incarnation up?"""
        return peer in self._alive

    def held(self, peer: str) -> bool:
        """Does it hang?"""
        return _agent_of(peer) in self._held


class LocalTransfer:
    """A transfer that reaches its peers through a ``LocalFabric``. See ``Transfer`` for the contract."""

    def __init__(self, fabric: LocalFabric, name: str, *, metrics: TransferMetrics | None = None) -> None:
        self._fabric = fabric
        self._name = name
        self._metrics = metrics or TransferMetrics.unregistered()
        self._lock = threading.RLock()
        self._peer_id = f"{name}#{secrets.token_hex(6)}"
        self._regions: dict[str, MemoryRegion] = {}
        self._peers: dict[PeerId, Endpoint] = {}
        self._pending: set[LocalTicket] = set()
        self._closed = False
        fabric.join(self._peer_id)

    def register(self, region: MemoryRegion) -> None:
        """See ``Transfer.register``."""
        with self._lock:
            self._require_open()
            if region.name in self._regions:
                raise ValueError(f"region {region.name!r} is registered already")
            if region.device_id != HOST_MEMORY:
                raise TransferUnavailable(f"a local transfer moves host memory only, got {region!r}")
            self._regions[region.name] = region

    def endpoint(self) -> Endpoint:
        """See ``Transfer.endpoint``."""
        with self._lock:
            self._require_open()
            regions = tuple(region.descriptor() for region in self._regions.values())
            return Endpoint(self._name, self._peer_id.encode(), regions)

    def connect(self, endpoint: Endpoint) -> PeerId:
        """See ``Transfer.connect``."""
        with self._lock:
            self._require_open()
            try:
                peer = PeerId(endpoint.metadata.decode())
            except UnicodeDecodeError as error:
                raise TransferFailed(endpoint.agent, f"metadata refused: {error}") from error
            if _agent_of(peer) != endpoint.agent:
                raise TransferFailed(endpoint.agent, f"metadata refused: it is of {peer!r}")
            for other in [
                p for p, known in self._peers.items() if known.agent == endpoint.agent and p != peer
            ]:
                del self._peers[other]
            self._peers[peer] = endpoint
            return peer

    def forget(self, peer: PeerId) -> None:
        """See ``Transfer.forget``."""
        with self._lock:
            self._peers.pop(peer, None)

    def read(self, peer: PeerId, copies: Sequence[Copy]) -> LocalTicket:
        """See ``Transfer.read``."""
        with self._lock:
            self._require_open()
            endpoint = self._peers.get(peer)
            if endpoint is None:
                raise UnknownPeer(peer)
            regions = {region.name: region for region in endpoint.regions}
            spans = [coalesce(group) for group in resolve(copies, regions, self._regions)]
            ticket = LocalTicket(self, peer, spans)
            self._pending.add(ticket)
            self._metrics.descriptors.inc(sum(map(len, spans)))
        self.advance(ticket)
        return ticket

    def progress(self) -> None:
        """See ``Transfer.progress``."""
        with self._lock:
            self._require_open()
            for ticket in tuple(self._pending):
                self.advance(ticket)

    def close(self) -> None:
        """See ``Transfer.close``."""
        with self._lock:
            self._closed = True
            self._fabric.cut(self._name)
            for ticket in tuple(self._pending):
                self._finish(ticket, TransferFailed(_agent_of(ticket.peer), "the transfer was closed"))

    def pending(self) -> int:
        """Reads that are not known to be over."""
        return len(self._pending)

    def advance(self, ticket: LocalTicket) -> None:
        """Copy, fail, or leave a ticket as it is."""
        with self._lock:
            if ticket.state is not TransferState.PENDING or self._fabric.held(ticket.peer):
                return
            if self._fabric.before_copy is not None and ticket.spans:
                self._fabric.before_copy()
            if not self._fabric.alive(ticket.peer):
                self._finish(ticket, PeerLost(_agent_of(ticket.peer), "disconnected"))
                return
            for group in ticket.spans:
                for remote_address, local_address, nbytes in group.rows():
                    ctypes.memmove(local_address, remote_address, nbytes)
            self._finish(ticket, None)

    def wait_for(self, ticket: LocalTicket, deadline_s: float) -> TransferState:
        """``TransferTicket.wait`` of one of our tickets."""
        ends_at = time.monotonic() + deadline_s
        while True:
            self.advance(ticket)
            if ticket.state is not TransferState.PENDING:
                return ticket.state
            with self._fabric.changed:
                left = ends_at - time.monotonic()
                if left <= 0 or not self._fabric.held(ticket.peer):
                    break
                self._fabric.changed.wait(left)
        self.advance(ticket)
        if ticket.state is TransferState.PENDING:
            self._metrics.deadlines_missed.inc()
        return ticket.state

    def _finish(self, ticket: LocalTicket, error: TransferFailed | None) -> None:
        ticket.error = error
        ticket.state = TransferState.DONE if error is None else TransferState.FAILED
        self._pending.discard(ticket)
        self._metrics.transfers.labels(outcome=ticket.state.value).inc()
        if error is None:
            self._metrics.bytes.inc(sum(int(group.nbytes.sum()) for group in ticket.spans))
            self._metrics.seconds.observe(time.monotonic() - ticket.started_at)

    def _require_open(self) -> None:
        if self._closed:
            raise TransferUnavailable(f"transfer {self._name} is closed")


@dataclass(eq=False, slots=True)
class LocalTicket:
    """A read under way; belongs to its ``LocalTransfer``. See ``TransferTicket`` for the contract."""

    transfer: LocalTransfer
    peer: PeerId
    spans: Sequence[Spans]
    state: TransferState = TransferState.PENDING
    error: TransferFailed | None = None
    started_at: float = field(default_factory=time.monotonic)

    def poll(self) -> TransferState:
        """See ``TransferTicket.poll``."""
        self.transfer.advance(self)
        return self.state

    def wait(self, deadline_s: float) -> TransferState:
        """See ``TransferTicket.wait``."""
        return self.transfer.wait_for(self, deadline_s)


def _agent_of(peer: str) -> str:
    return peer.rpartition("#")[0]
