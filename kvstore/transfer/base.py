"""What every transport promises. Mutation, lifetime, threads and failure are stated here and nowhere else."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from epdserve.kvstore.errors import TransferFailed
from epdserve.kvstore.types import Endpoint, MemoryRegion, PeerId


class TransferState(enum.Enum):
    """How far a transfer is."""

    PENDING = "pending"  # bytes may land in the destination at any moment
    DONE = "done"  # every byte has landed
    FAILED = "failed"  # content undefined, but nothing lands any more


class Copy(NamedTuple):  # a tuple, as hundreds are made for one hand-off
    """Read ``nbytes`` from the start of one place of a peer's region into the start of one of ours."""

    remote_region: str
    remote_index: int
    local_region: str
    local_index: int
    nbytes: int


class TransferTicket(Protocol):
    """One read under way. Thread-safe.

    Keep the ticket until it is over: dropping it neither cancels the transfer nor makes its destination safe.
    """

    @property
    def error(self) -> TransferFailed | None:
        """Why the transfer FAILED; None in every other state."""

    def poll(self) -> TransferState:
        """Drive the transport a little and say how far the transfer is. Does not block on the peer."""

    def wait(self, deadline_s: float) -> TransferState:
        """Block this thread until the transfer is over, for at most ``deadline_s`` seconds from now.

        PENDING means the time is up. The transport cannot take the request back, so the destination is undefined
        and stays so: quarantine it until ``poll`` says DONE or FAILED, or until the whole transfer is closed.
        """


class Transfer(Protocol):
    """Reads places of peers' registered memory into our own. Thread-safe.

    Registered memory must stay where it is until ``close`` has returned; nothing here keeps it alive.
    """

    def register(self, region: MemoryRegion) -> None:
        """Make a region readable by peers, and usable as a destination. Slow; call at start, before ``endpoint``.

        Raises:
            ValueError: A region of that name is registered already.
            TransferUnavailable: The transport refuses the memory.
        """

    def endpoint(self) -> Endpoint:
        """How peers reach the regions registered so far."""

    def connect(self, endpoint: Endpoint) -> PeerId:
        """Get to know a peer; returns its present incarnation.

        Cheap when nothing changed: the same (agent, metadata) gives the same id. A known agent with other
        metadata has restarted: it gets a new id, and its old one is forgotten. A peer that was lost is tried anew.

        Raises:
            TransferFailed: The metadata cannot be used.
        """

    def forget(self, peer: PeerId) -> None:
        """Take no new reads from a peer. Reads under way go on to their end; unknown peers are ignored."""

    def read(self, peer: PeerId, copies: Sequence[Copy]) -> TransferTicket:
        """Start copying; all of ``copies`` form one transfer.

        May do the whole copy before it returns (shared memory does): call it off the event loop. A peer that is
        gone shows as a FAILED ticket, not as an error. Destinations are undefined until the ticket is DONE.

        Raises:
            UnknownPeer: Never connected, or forgotten.
            ValueError: A region, an index or a length that does not exist on its side, or two copies into one place.
        """

    def progress(self) -> None:
        """Serve peers and drive our own reads. Over TCP a peer's read stands still while its source does not call
        this; once a millisecond is a good pace.
        """

    def close(self) -> None:
        """Tear everything down. Afterwards nothing lands in our memory any more, and no ticket is PENDING."""
