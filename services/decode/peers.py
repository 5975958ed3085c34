"""Prefill workers as a decode worker knows them: the doors to their memory, and the leases they have given."""

from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.peer_book import PeerBook, View
from epdserve.services.errors import WorkerLost
from epdserve.services.rpc.client import PrefillClient
from epdserve.services.types import KVHandle, WorkerRole


class GrpcPeers:
    """Implements ``Peers``. Owned by one event loop; the view is its owner's to start and close.

    Args:
        token: The cluster token.
    """

    def __init__(self, view: View, *, token: str) -> None:
        self._book = PeerBook(view, token=token, roles={WorkerRole.PREFILL})

    async def endpoint(self, worker: str, *, incarnation: str, deadline_s: float) -> Endpoint:
        """See ``Peers.endpoint``; asked once in the life of a peer."""
        return await self._book.endpoint(worker, incarnation=incarnation, deadline_s=deadline_s)

    async def release_lease(self, handle: KVHandle, *, deadline_s: float) -> bool:
        """See ``Peers.release_lease``."""
        client = await self._book.client(handle.worker, incarnation=handle.incarnation, deadline_s=deadline_s)
        if not isinstance(client, PrefillClient):
            raise WorkerLost(f"{handle.worker} is no prefill worker", worker=handle.worker)
        return await client.release_lease(handle.lease, incarnation=handle.incarnation, deadline_s=deadline_s)

    async def close(self) -> None:
        """Close all connections."""
        await self._book.close()
