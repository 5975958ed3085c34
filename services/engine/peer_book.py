"""Workers and stores over gRPC, found through the registry: an address never comes out of a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.endpoint import from_wire
from epdserve.services.errors import DeadlineExceeded, WorkerLost
from epdserve.services.rpc.client import DecodeClient, PrefillClient
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.types import WorkerInfo, WorkerRole

Client = PrefillClient | DecodeClient | StoreClient

_CLIENTS: dict[WorkerRole, type[PrefillClient] | type[DecodeClient] | type[StoreClient]] = {
    WorkerRole.PREFILL: PrefillClient,
    WorkerRole.DECODE: DecodeClient,
    WorkerRole.STORE: StoreClient,
}


class View(Protocol):
    """Who is there, as the registry has it: a ``ClusterView``."""

    def get(self, worker: str) -> WorkerInfo | None:
        """One worker, None if it is not alive."""

    async def refresh(self) -> bool:
        """Ask the registry now; whether it answered."""


@dataclass(slots=True, eq=False)
class _Peer:
    incarnation: str
    client: Client
    endpoint: Endpoint | None = None


class PeerBook:
    """Connections to peers of present incarnations. Owned by one event loop; the view is its owner's.

    Args:
        token: The cluster token.
        roles: Of peers; others are strangers.
    """

    def __init__(
        self, view: View, *, token: str, roles: Collection[WorkerRole] = frozenset(_CLIENTS)
    ) -> None:
        self._view, self._token, self._roles = view, token, roles
        self._peers: dict[str, _Peer] = {}
        self._meeting = asyncio.Lock()

    async def endpoint(self, worker: str, *, incarnation: str, deadline_s: float) -> Endpoint:
        """The door to a peer's memory; asked once in the life of a peer.

        Raises:
            ServiceError: It is not known, lives another life, or does not answer.
        """
        peer = await self._peer(worker, incarnation, deadline_s)
        if peer.endpoint is None:
            description = await peer.client.describe(deadline_s=deadline_s)
            if description.info.incarnation != incarnation:
                raise WorkerLost(f"{worker} lives another life", worker=worker)
            peer.endpoint = from_wire(description.endpoint)
        return peer.endpoint

    async def client(self, worker: str, *, incarnation: str, deadline_s: float) -> Client:
        """A client of a peer, as its role has it.

        Raises:
            ServiceError: It is not known, or lives another life.
        """
        return (await self._peer(worker, incarnation, deadline_s)).client

    async def store(self, worker: str, *, incarnation: str, deadline_s: float) -> StoreClient:
        """A client of another store.

        Raises:
            ServiceError: It is not known, lives another life, or is no store.
        """
        peer = await self._peer(worker, incarnation, deadline_s)
        if not isinstance(peer.client, StoreClient):
            raise WorkerLost(f"{worker} is no store", worker=worker)
        return peer.client

    async def forget_absent(self) -> None:
        """Close connections to peers that the registry no longer lists."""
        for worker in [name for name in self._peers if self._view.get(name) is None]:
            await _close(self._peers.pop(worker).client)

    async def close(self) -> None:
        """Close all connections."""
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            await _close(peer.client)

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
        if not _is(info, incarnation):
            await self._view.refresh()  # a worker that has just started may be news to us
            info = self._view.get(worker)
        if info is None or not _is(info, incarnation) or info.role not in self._roles:
            raise WorkerLost(f"no worker {worker} of this incarnation", worker=worker)
        client = _CLIENTS[info.role](info.address, token=self._token, worker=worker)
        self._peers[worker] = _Peer(incarnation, client)
        if peer is not None:
            await _close(peer.client)
        return self._peers[worker]


def _is(info: WorkerInfo | None, incarnation: str) -> bool:
    return info is not None and info.incarnation == incarnation


async def _close(client: Client) -> None:
    with contextlib.suppress(TimeoutError):
        await client.close()
