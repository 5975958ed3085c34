"""Encode workers as a prefill worker knows them: by the registry, one connection for each life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.endpoint import from_wire
from epdserve.services.errors import ServiceError, WorkerLost
from epdserve.services.image_types import LentEmbeddings
from epdserve.services.rpc.encode_client import EncodeClient
from epdserve.services.types import WorkerInfo

log = logging.getLogger(__name__)

_END_LOAN_S: Final = 2.0
_MAX_ENDING: Final = 256


@dataclass(frozen=True, slots=True, eq=False)
class EncodePeer:
    """One life of a worker that embeds images."""

    worker: str
    incarnation: str
    client: EncodeClient
    endpoint: Endpoint


class EncodePeers:
    """Owned by the event loop.

    Args:
        find: A worker as the registry has it now.
        token: The cluster token.
    """

    def __init__(self, find: Callable[[str], WorkerInfo | None], *, token: str) -> None:
        self._find, self._token = find, token
        self._peers: dict[str, EncodePeer] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def peer(self, worker: str, incarnation: str, *, deadline_s: float) -> EncodePeer:
        """A connection to this life of a worker.

        Raises:
            WorkerLost: The registry does not know it, or knows another life.
            ServiceError: It does not answer.
        """
        info = self._find(worker)
        if info is None or info.incarnation != incarnation:
            raise WorkerLost(f"{worker} is gone", worker=worker)
        known = self._peers.get(worker)
        if known is not None and known.incarnation == incarnation:
            return known
        client = EncodeClient(info.address, token=self._token, worker=worker)
        try:
            description = await client.describe(deadline_s=deadline_s)
            endpoint = from_wire(description.endpoint)
        except BaseException:
            await client.close()
            raise
        if (other := self._peers.get(worker)) is not None and other.incarnation == incarnation:
            await client.close()  # another request was faster
            return other
        self._peers[worker] = fresh = EncodePeer(worker, incarnation, client, endpoint)
        if known is not None:
            await known.client.close()
        return fresh

    def end_soon(self, peer: EncodePeer, lent: LentEmbeddings) -> None:
        """End a lease without waiting; one that cannot be ended ends by itself."""
        if len(self._ending) < _MAX_ENDING:
            task = asyncio.get_running_loop().create_task(self._end(peer, lent), name="end-loan")
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close every connection."""
        if self._ending:
            await asyncio.wait(list(self._ending), timeout=_END_LOAN_S)
        for peer in self._peers.values():
            await peer.client.close()
        self._peers.clear()

    async def _end(self, peer: EncodePeer, lent: LentEmbeddings) -> None:
        try:
            await peer.client.end_loan(lent.lease, incarnation=lent.incarnation, deadline_s=_END_LOAN_S)
        except ServiceError as error:
            log.debug("loan not ended", extra={"peer": peer.worker, "error": error.code})
