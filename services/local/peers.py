"""Prefill and decode in one process: the peer is known, and its leases are at hand."""

from epdserve.kvstore.lease import LeaseTable
from epdserve.kvstore.transfer.base import Transfer
from epdserve.kvstore.types import Endpoint, LeaseId
from epdserve.services.errors import WorkerLost
from epdserve.services.types import KVHandle


class LocalPeers:
    """``Peers`` over objects instead of calls. Thread-safe as far as its parts are.

    Args:
        incarnations: Live prefill workers by name.
    """

    def __init__(self, transfer: Transfer, leases: LeaseTable, incarnations: dict[str, str]) -> None:
        self._transfer, self._leases, self._incarnations = transfer, leases, incarnations

    async def endpoint(self, worker: str, *, incarnation: str, deadline_s: float) -> Endpoint:
        """See ``Peers.endpoint``."""
        if self._incarnations.get(worker) != incarnation:
            raise WorkerLost(f"no worker {worker} of incarnation {incarnation}", worker=worker)
        return self._transfer.endpoint()

    async def release_lease(self, handle: KVHandle, *, deadline_s: float) -> bool:
        """See ``Peers.release_lease``."""
        if self._incarnations.get(handle.worker) != handle.incarnation:
            return False
        return self._leases.end(LeaseId(handle.lease))
