"""What a ``NixlTransfer`` remembers of its peers and of reads under way. Knows no NIXL."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from epdserve.kvstore.errors import TransferFailed
from epdserve.kvstore.transfer.base import TransferState
from epdserve.kvstore.transfer.pacing import Pauses
from epdserve.kvstore.types import Endpoint, PeerId, RegionDescriptor

_FIRST_PAUSE_S: Final = 0.00005
_LONGEST_PAUSE_S: Final = 0.00025  # longer ones let a socket run dry


@dataclass(slots=True)
class NixlPeer:
    """One incarnation of a peer."""

    peer_id: PeerId  # the name of the peer's agent within NIXL
    endpoint: Endpoint
    regions: dict[str, RegionDescriptor] = field(init=False)  # what it offers, by name
    reads: int = 0
    retired: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        self.meet(self.endpoint)

    def meet(self, endpoint: Endpoint) -> None:
        """It is there, and offers this."""
        self.endpoint, self.retired = endpoint, False
        self.regions = {region.name: region for region in endpoint.regions}


class TicketOwner(Protocol):
    """What a ticket asks of its transfer."""

    def poll_ticket(self, ticket: NixlTicket) -> TransferState:
        """Drive one read and say how far it is."""

    def missed_deadline(self) -> None:
        """Count a wait that ended before its transfer."""


class NixlTicket:
    """A read under way; belongs to a ``NixlTransfer``. See ``TransferTicket`` for the contract."""

    def __init__(self, owner: TicketOwner, peer: NixlPeer, nbytes: int) -> None:
        self._owner = owner
        self.peer = peer
        self.nbytes = nbytes
        self.started_at = time.monotonic()
        self.handles: list[Any] = []
        self.posted = False
        self.state = TransferState.PENDING
        self.first_error: TransferFailed | None = None  # the state follows once every request is over

    @property
    def error(self) -> TransferFailed | None:
        """Why the transfer FAILED; None in every other state."""
        return self.first_error if self.state is TransferState.FAILED else None

    def fail(self, error: TransferFailed) -> None:
        """Remember the first error."""
        self.first_error = self.first_error or error

    def poll(self) -> TransferState:
        """See ``TransferTicket.poll``."""
        return self._owner.poll_ticket(self)

    def wait(self, deadline_s: float) -> TransferState:
        """See ``TransferTicket.wait``."""
        ends_at = time.monotonic() + deadline_s
        pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while (state := self.poll()) is TransferState.PENDING:
            left = ends_at - time.monotonic()
            if left <= 0:
                self._owner.missed_deadline()
                break
            time.sleep(min(pauses.next_s(), left))
            pauses.begin()
        return state
