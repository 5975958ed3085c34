"""Prefill workers over gRPC, found through the registry: an address never comes out of a request."""

import asyncio
from dataclasses import dataclass

from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.endpoint import from_wire
from epdserve.services.errors import DeadlineExceeded, WorkerLost
from epdserve.services.pool.view import ClusterView
from epdserve.services.rpc.client import PrefillClient
from epdserve.services.types import KVHandle, WorkerRole


@dataclass(slots=True, eq=False)
class _Peer:
    incarnation: str
    client: PrefillClient
    endpoint: Endpoint | None = None


class GrpcPeers:
    """Implements ``Peers``. Owned by one event loop; the view is its owner's to start and close.

    Args:
        token: The cluster token.
    """

    def __init__(self, view: ClusterView, *, token: str) -> None:
        self._view, self._token = view, token
        self._peers: dict[str, _Peer] = {}
        self._meeting = asyncio.Lock()

    async def endpoint(self, worker: str, *, incarnation: str, deadline_s: float) -> Endpoint:
        """See ``Peers.endpoint``; asked once in the life of a peer."""
        peer = await self._peer(worker, incarnation, deadline_s)
        if peer.endpoint is None:
            description = await peer.client.describe(deadline_s=deadline_s)
            if description.info.incarnation != incarnation:
                raise WorkerLost(f"{worker} lives another life", worker=worker)
            peer.endpoint = from_wire(description.endpoint)
        return peer.endpoint

    async def release_lease(self, handle: KVHandle, *, deadline_s: float) -> bool:
        """See ``Peers.release_lease``."""
        peer = await self._peer(handle.worker, handle.incarnation, deadline_s)
        return await peer.client.release_lease(
            handle.lease, incarnation=handle.incarnation, deadline_s=deadline_s
        )

    async def close(self) -> None:
        """Close all connections."""
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            await peer.client.close()

    async def _peer(self, worker: str, incarnation: str, deadline_s: float) -> _Peer:
        peer = self._peers.get(worker)
        if peer is not None and peer.incarnation == incarnation:
            return peer
        try:
            async with asyncio.timeout(deadline_s), self._meeting:
                return await self._meet(worker, incarnation)
        except TimeoutError:
            raise DeadlineExceeded(f"{worker} not found in {deadline_s} s", worker=worker) from None

    async def _meet(self, worker: str, incarnation: str) -> _Peer:
        peer = self._peers.get(worker)
        if peer is not None and peer.incarnation == incarnation:
            return peer
        info = self._view.get(worker)
        if info is None or info.incarnation != incarnation:
            await self._view.refresh()  # a worker that has just started may be news to us
            info = self._view.get(worker)
        if info is None or info.incarnation != incarnation or info.role is not WorkerRole.PREFILL:
            raise WorkerLost(f"no prefill worker {worker} of this incarnation", worker=worker)
        client = PrefillClient(info.address, token=self._token, worker=worker)
        self._peers[worker] = _Peer(incarnation, client)
        if peer is not None:
            await peer.client.close()
        return self._peers[worker]
