"""Reads places of a peer's memory into slots of ours, and never leaves a slot behind that a late write may hit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from epdserve.kvstore.slots import Slot
from epdserve.kvstore.transfer.base import Copy
from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.transfer_thread import ReadOutcome, TransferThread
from epdserve.services.errors import ServiceError


class SlotOwner(Protocol):
    """Who gave the slots out: a ``HostCache``, a ``SwaPool``."""

    def abort(self, slot: Slot) -> None:
        """Free a slot that was being filled."""

    def quarantine(self, slot: Slot) -> None:
        """Set it apart, as a late write may still land."""

    def transfer_over(self, slot: Slot) -> None:
        """Free it after that."""


class Puller:
    """Owned by one event loop.

    Args:
        transfers: Runs the reads.
    """

    def __init__(self, transfers: TransferThread) -> None:
        self._transfers = transfers

    async def fill(
        self,
        endpoint: Endpoint,
        region: str,
        places: Sequence[int],
        slots: Sequence[Slot],
        *,
        into: str,
        owner: SlotOwner,
        nbytes: int,
        deadline_s: float,
    ) -> ReadOutcome:
        """Read ``nbytes`` of each place into the slot of the same number, as one transfer.

        After DONE the slots are the caller's to seal or abort. Otherwise they are taken care of: freed, or in
        quarantine until the transfer is over. Not to be cancelled: run it in a task that is awaited to its end.

        Args:
            endpoint: Of the peer, whose ``region`` has the places.
            places: One for each slot.
            slots: Of ``owner``, in the region ``into``; being filled.
            nbytes: Of each.
            deadline_s: From now on.
        """
        copies = [
            Copy(region, place, into, slot.index, nbytes) for place, slot in zip(places, slots, strict=True)
        ]
        try:
            read = self._transfers.read(endpoint, copies, deadline_s=deadline_s)
        except ServiceError:
            _each(owner.abort, slots)
            return ReadOutcome.FAILED
        outcome = await asyncio.wrap_future(read.future)
        if outcome is ReadOutcome.FAILED:
            _each(owner.abort, slots)
        elif outcome is ReadOutcome.LATE:
            _each(owner.quarantine, slots)
            if self._transfers.settle(read, lambda: _each(owner.transfer_over, slots)):
                _each(owner.transfer_over, slots)
        return outcome


def _each(action: Callable[[Slot], None], slots: Sequence[Slot]) -> None:
    for slot in slots:
        action(slot)
