"""The store of this worker's machine: found in the registry, trusted as far as it answers.

A store that is missing, slow or failing costs hits and nothing else. After a failure it is left alone for a moment, so
that not every request waits for the same deadline.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from epdserve.kvstore.clock import Clock
from epdserve.kvstore.types import Endpoint
from epdserve.services.engine.endpoint import from_wire
from epdserve.services.errors import ServiceError, Unavailable
from epdserve.services.rpc.store_client import StoreClient
from epdserve.services.store_types import BLOCKS, TAILS
from epdserve.services.types import WorkerInfo

log = logging.getLogger(__name__)

_REST_S: Final = 1.0  # after a failure
_CLOSE_S: Final = 2.0


@dataclass(slots=True, eq=False)
class Store:
    """One life of the store.

    Attributes:
        endpoint: The door to its memory, once asked for.
    """

    info: WorkerInfo
    client: StoreClient
    endpoint: Endpoint | None = None
    unfit: bool = False


class StoreLink:
    """Owned by the event loop.

    Args:
        find: The store of this machine as the registry has it now.
        token: The cluster token.
        page_bytes: Of a block; a store of other sizes is of no use.
        tail_bytes: Of a tail record.
    """

    def __init__(
        self,
        find: Callable[[], WorkerInfo | None],
        *,
        token: str,
        page_bytes: int,
        tail_bytes: int,
        clock: Clock,
    ) -> None:
        self._find, self._token, self._clock = find, token, clock
        self._sizes = {BLOCKS: page_bytes, TAILS: tail_bytes}
        self._store: Store | None = None
        self._rests_until = float("-inf")
        self._closing: set[asyncio.Task[None]] = set()

    def store(self) -> Store | None:
        """The store to ask, or None: there is none, or it has just failed."""
        info = self._find()
        if info is None or self._clock.monotonic() < self._rests_until:
            return None
        if self._store is None or self._life(self._store.info) != self._life(info):
            if self._store is not None:
                self.later(self._store.client.close())
            client = StoreClient(info.address, token=self._token, worker=info.worker)
            self._store = Store(info, client)
        return None if self._store.unfit else self._store

    async def endpoint(self, store: Store, *, deadline_s: float) -> Endpoint:
        """The door to a store's memory; asked once in its life.

        Raises:
            ServiceError: It does not answer, or its blocks or tails have other sizes than ours.
        """
        if store.endpoint is None:
            endpoint = from_wire((await store.client.describe(deadline_s=deadline_s)).endpoint)
            strides = {region.name: region.stride for region in endpoint.regions}
            if any(strides.get(name) != size for name, size in self._sizes.items()):
                store.unfit = True
                log.error("store of other sizes", extra={"store": store.info.worker, "strides": strides})
                raise Unavailable(
                    "the machine's store holds blocks of another model", worker=store.info.worker
                )
            store.endpoint = endpoint
        return store.endpoint

    def failed(self, store: Store, error: ServiceError) -> None:
        """A call went wrong: leave the store alone for a moment."""
        self._rests_until = self._clock.monotonic() + _REST_S
        log.warning("store failed", extra={"store": store.info.worker, "error": error.code})

    def later(self, work: Coroutine[Any, Any, object]) -> None:
        """Let a call that nobody waits for run beside its caller; ``close`` waits for it."""
        task = asyncio.get_running_loop().create_task(_quietly(work), name="store-afterwards")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the connection."""
        if self._store is not None:
            self.later(self._store.client.close())
            self._store = None
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)

    def _life(self, info: WorkerInfo) -> tuple[str, str, str]:
        return info.worker, info.incarnation, info.address


async def _quietly(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except ServiceError as error:
        log.debug("call to the store failed", extra={"error": error.code})
