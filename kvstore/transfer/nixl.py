"""Transfer over NIXL's UCX backend: RDMA where there is any, shared memory or TCP elsewhere.

The only import of nixl. What was found by trying (nixl 1.5.1) and shapes this file:

- A request under way cannot be taken back. Releasing its handle, or removing the remote agent, reports success
  and the bytes land all the same. So a handle is released only once its state is final, and a forgotten peer is
  removed only once its last request is over. Destroying the agent does stop late bytes.
- Errors arrive as exceptions: ``nixlRemoteDisconnectError`` some 30 ms after a peer's death.
- Over shared memory the copy happens inside the call that posts it, without Python's lock. Requests are posted
  in batches of a few MiB, so that other threads get at the agent in between.
- Agents are named ``<name>#<random>``: a restarted peer is a new agent for NIXL, never a changed one.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from epdserve.kvstore.errors import PeerLost, TransferFailed, TransferUnavailable, UnknownPeer
from epdserve.kvstore.metrics import TransferMetrics
from epdserve.kvstore.transfer.base import Copy, TransferState
from epdserve.kvstore.transfer.nixl_ticket import NixlPeer, NixlTicket
from epdserve.kvstore.transfer.plan import Ints, Place, Spans, batches, coalesce, resolve, resolve_one
from epdserve.kvstore.types import HOST_MEMORY, Endpoint, MemoryRegion, PeerId

_log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 8 << 20
_BATCH_SPANS: Final = 1024
# (N, 3) rows of address, bytes and device, and the kind of memory
_Descriptors = tuple[npt.NDArray[np.uint64] | list[tuple[int, int, int]], str]
# UCX's own 8 KiB make a system call, and a turn of both sides, of every 8 KiB of a read
_UCX_TCP: Final = {
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_TCP_SNDBUF": "4m",
    "UCX_TCP_RCVBUF": "4m",
}
_SPLIT_TRANSPORTS: Final = ("tcp", "all", "^")  # what a usable UCX_TLS names, or begins with


class NixlTransfer:
    """One NIXL agent of this process. See ``Transfer`` for the contract."""

    def __init__(
        self, name: str, *, loopback_only: bool = False, metrics: TransferMetrics | None = None
    ) -> None:
        """Create the agent ``name``.

        Args:
            loopback_only: UCX listens on the loopback device and nowhere else, for all agents of the process. A
                UCX_NET_DEVICES that is set already wins.

        Raises:
            TransferUnavailable: NIXL is missing, has no UCX plug-in, or UCX finds no transport.
        """
        self._name = name
        self._metrics = metrics or TransferMetrics.unregistered()
        self._outcomes = {
            state: self._metrics.transfers.labels(outcome=state.value)
            for state in (TransferState.DONE, TransferState.FAILED)
        }
        self._lock = threading.Lock()  # around every call: NIXL itself runs unsynchronised
        if loopback_only:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self._door = _Door()
        self._agent: Any = self._door.open_agent(f"{name}#{secrets.token_hex(6)}")
        self._regions: dict[str, MemoryRegion] = {}
        self._peers: dict[PeerId, NixlPeer] = {}
        self._current: dict[str, PeerId] = {}  # a peer's name -> its present incarnation
        self._pending: set[NixlTicket] = set()

    def register(self, region: MemoryRegion) -> None:
        """See ``Transfer.register``."""
        with self._lock:
            agent = self._open_agent()
            if region.name in self._regions:
                raise ValueError(f"region {region.name!r} is registered already")
            kind, device = _memory_kind(region.device_id)
            try:
                agent.register_memory([(region.address, region.nbytes, device, "")], kind)
            except self._door.errors as error:
                raise TransferUnavailable(f"cannot register {region!r}: {error!r}") from error
            self._regions[region.name] = region

    def endpoint(self) -> Endpoint:
        """See ``Transfer.endpoint``."""
        with self._lock:
            regions = tuple(region.descriptor() for region in self._regions.values())
            return Endpoint(self._name, self._open_agent().get_agent_metadata(), regions)

    def connect(self, endpoint: Endpoint) -> PeerId:
        """See ``Transfer.connect``."""
        with self._lock:
            agent = self._open_agent()
            known = self._peers.get(self._current.get(endpoint.agent, PeerId("")))
            if known is not None and known.lost:
                self._let_go_of_lost(known)
                known = None
            if known is not None and known.endpoint == endpoint:
                return known.peer_id
            try:
                native = agent.add_remote_agent(endpoint.metadata)
            except self._door.errors as error:
                raise TransferFailed(endpoint.agent, f"metadata refused: {error!r}") from error
            peer_id = PeerId(native.decode() if isinstance(native, bytes) else str(native))
            if known is not None and known.peer_id != peer_id:
                self._retire(known)
            # known to NIXL already: with more regions now, or forgotten with reads under way
            peer = self._peers.setdefault(peer_id, NixlPeer(peer_id, endpoint))
            peer.meet(endpoint)
            self._current[endpoint.agent] = peer_id
            return peer_id

    def forget(self, peer: PeerId) -> None:
        """See ``Transfer.forget``."""
        with self._lock:
            known = self._peers.get(peer)
            if known is not None and not known.retired:
                self._retire(known)

    def read(self, peer: PeerId, copies: Sequence[Copy]) -> NixlTicket:
        """See ``Transfer.read``. Over shared memory this copies; other threads run meanwhile."""
        with self._lock:
            self._open_agent()
            known = self._peers.get(peer)
            if known is None or known.retired:
                raise UnknownPeer(peer)
            if len(copies) == 1 and copies[0].nbytes <= _BATCH_BYTES:
                place = resolve_one(copies[0], known.regions, self._regions)
                ticket = self._new_ticket(known, place.nbytes)
                self._post(ticket, *_descriptors_of_one(place))
                return self._posted(ticket)  # no need to let others in between
            spans = [coalesce(group) for group in resolve(copies, known.regions, self._regions)]
            ticket = self._new_ticket(known, sum([copy.nbytes for copy in copies]))
        for group in spans:
            for batch in batches(group, max_bytes=_BATCH_BYTES, max_spans=_BATCH_SPANS):
                with self._lock:
                    self._post(ticket, *_descriptors(batch))
        with self._lock:
            return self._posted(ticket)

    def progress(self) -> None:
        """See ``Transfer.progress``."""
        with self._lock:
            self._open_agent().get_new_notifs()  # drives UCX; nobody sends us notifications, so none are kept
            for ticket in tuple(self._pending):
                self._advance(ticket)

    def close(self) -> None:
        """See ``Transfer.close``."""
        with self._lock:
            if self._agent is None:
                return
            for ticket in tuple(self._pending):
                # cancels nothing, but every handle holds on to the agent, which must go for bytes to stop
                for handle in ticket.handles:
                    self._release(handle)
                ticket.handles.clear()
                ticket.fail(TransferFailed(ticket.peer.endpoint.agent, "the transfer was closed"))
                self._finish(ticket)
            self._agent = None  # the last reference: destroys it here and now

    def pending(self) -> int:
        """Reads that are not known to be over."""
        return len(self._pending)

    def poll_ticket(self, ticket: NixlTicket) -> TransferState:
        """``TransferTicket.poll`` of one of our tickets."""
        if ticket.state is TransferState.PENDING:
            with self._lock:
                self._advance(ticket)
        return ticket.state

    @property
    def native(self) -> Any:
        """The agent itself, for measuring what this layer costs.

        Raises:
            TransferUnavailable: Closed.
        """
        return self._open_agent()

    def missed_deadline(self) -> None:
        """Count a wait that ended before its transfer."""
        self._metrics.deadlines_missed.inc()

    # -- under the lock -----------------------------------------------------------------------------------------

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise TransferUnavailable(f"transfer {self._name} is closed")
        return self._agent

    def _new_ticket(self, peer: NixlPeer, nbytes: int) -> NixlTicket:
        ticket = NixlTicket(self, peer, nbytes)
        peer.reads += 1
        self._pending.add(ticket)
        return ticket

    def _posted(self, ticket: NixlTicket) -> NixlTicket:
        ticket.posted = True
        self._advance(ticket)
        return ticket

    def _post(self, ticket: NixlTicket, remote: _Descriptors, local: _Descriptors) -> None:
        if ticket.first_error is not None:
            return
        if self._agent is None:
            ticket.fail(TransferFailed(ticket.peer.endpoint.agent, "the transfer was closed"))
            return
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(*local), agent.get_xfer_descs(*remote), str(ticket.peer.peer_id)
            )
        except self._door.errors as error:
            self._failed(ticket, error)
            return
        self._metrics.descriptors.inc(len(local[0]))
        try:
            over = agent.transfer(handle) == "DONE"
        except self._door.errors as error:
            self._failed(ticket, error)
            over = True
        if over:
            self._release(handle)
        else:
            ticket.handles.append(handle)

    def _advance(self, ticket: NixlTicket) -> None:
        if ticket.state is not TransferState.PENDING or self._agent is None:
            return
        for handle in tuple(ticket.handles):
            try:
                state = self._agent.check_xfer_state(handle)
            except self._door.errors as error:
                self._failed(ticket, error)
                state = "ERR"
            if state == "PROC":
                continue
            if state == "ERR":
                ticket.fail(TransferFailed(ticket.peer.endpoint.agent, "NIXL reports an error"))
            ticket.handles.remove(handle)
            self._release(handle)
        if ticket.posted and not ticket.handles:
            self._finish(ticket)

    def _failed(self, ticket: NixlTicket, error: Exception) -> None:
        agent = ticket.peer.endpoint.agent
        lost = isinstance(error, self._door.disconnected)
        ticket.peer.lost = ticket.peer.lost or lost
        ticket.fail(PeerLost(agent, "disconnected") if lost else TransferFailed(agent, repr(error)))

    def _finish(self, ticket: NixlTicket) -> None:
        ticket.state = TransferState.DONE if ticket.first_error is None else TransferState.FAILED
        self._pending.discard(ticket)
        self._outcomes[ticket.state].inc()
        if ticket.first_error is None:
            self._metrics.bytes.inc(ticket.nbytes)
            self._metrics.seconds.observe(time.monotonic() - ticket.started_at)
        ticket.peer.reads -= 1
        if ticket.peer.retired and ticket.peer.reads == 0:
            self._remove(ticket.peer)

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._door.errors:
            _log.debug("a transfer handle could not be released", exc_info=True)

    def _retire(self, peer: NixlPeer) -> None:
        peer.retired = True
        if self._current.get(peer.endpoint.agent) == peer.peer_id:
            del self._current[peer.endpoint.agent]
        if peer.reads == 0:
            self._remove(peer)

    def _remove(self, peer: NixlPeer) -> None:
        self._peers.pop(peer.peer_id, None)
        if self._agent is None:
            return
        try:
            self._agent.remove_remote_agent(str(peer.peer_id))
        except self._door.errors:
            _log.debug("a peer could not be removed", extra={"peer": peer.peer_id}, exc_info=True)

    def _let_go_of_lost(self, peer: NixlPeer) -> None:
        """Drop a lost peer so that it can be met anew; NIXL knows it by the same name then."""
        for ticket in tuple(self._pending):
            if ticket.peer is peer:
                self._advance(ticket)
        if peer.reads:
            raise TransferFailed(
                peer.endpoint.agent, f"{peer.reads} reads over its lost connection are not over"
            )
        self._retire(peer)


class _Door:
    """What is used of nixl, imported on first use and kept quiet."""

    def __init__(self) -> None:
        transports = os.environ.get("UCX_TLS")
        if transports is not None and not any(name in transports for name in _SPLIT_TRANSPORTS):
            raise TransferUnavailable(
                f"UCX_TLS={transports!r} lacks tcp, without which UCX cannot connect peers"
            )
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # every error also arrives as an exception
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        for setting, value in _UCX_TCP.items():
            os.environ.setdefault(setting, value)
        raise_exceptions = logging.raiseExceptions
        try:
            import nixl._api as api  # type: ignore[import-untyped]
            import nixl._bindings as bindings  # type: ignore[import-untyped]
        except ImportError as error:
            raise TransferUnavailable(f"nixl is not installed: {error}") from error
        finally:
            logging.raiseExceptions = raise_exceptions  # nixl turns it off for the whole process
        self._api: Any = api
        names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
        # they share no base but Exception; pybind11 itself raises the RuntimeError
        self.errors: tuple[type[Exception], ...] = (
            RuntimeError,
            *(getattr(bindings, name) for name in names),
        )
        self.disconnected: type[Exception] = bindings.nixlRemoteDisconnectError

    def open_agent(self, name: str) -> Any:
        # without a progress thread: its default burns a core per agent
        config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            agent = self._api.nixl_agent(name, config)
        except self.errors as error:
            raise TransferUnavailable(f"NIXL agent {name!r} cannot be made: {error!r}") from error
        if "UCX" not in agent.backends:
            raise TransferUnavailable("NIXL has no UCX plug-in")
        return agent


def shipped_plugins() -> list[str]:
    """Names of the back ends that the installed NIXL brings; whether one works is for its use to show.

    Raises:
        TransferUnavailable: As ``NixlTransfer``.
    """
    return sorted(str(name) for name in _Door().open_agent("plugins").get_plugin_list())


def _descriptors(batch: Spans) -> tuple[_Descriptors, _Descriptors]:
    """The remote and the local side of a batch."""
    sides = (batch.remote_addresses, batch.remote_device), (batch.local_addresses, batch.local_device)
    remote, local = (_rows(addresses, batch.nbytes, device) for addresses, device in sides)
    return remote, local


def _rows(addresses: Ints, nbytes: Ints, device_id: int) -> _Descriptors:
    kind, device = _memory_kind(device_id)
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device
    return rows, kind


def _descriptors_of_one(place: Place) -> tuple[_Descriptors, _Descriptors]:
    """``_descriptors`` of one copy; NIXL takes a tuple faster than an array."""
    remote_kind, remote_device = _memory_kind(place.remote_device)
    local_kind, local_device = _memory_kind(place.local_device)
    remote = [(place.remote_address, place.nbytes, remote_device)]
    return (remote, remote_kind), ([(place.local_address, place.nbytes, local_device)], local_kind)


def _memory_kind(device_id: int) -> tuple[str, int]:
    return ("DRAM", 0) if device_id == HOST_MEMORY else ("VRAM", device_id)
