"""Typed client of a store. Every call takes a deadline and raises ``ServiceError``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc import convert_store as convert
from epdserve.services.rpc.client import WorkerClient, called
from epdserve.services.rpc.convert_worker import description_from_pb
from epdserve.services.rpc.pb import common_pb2, store_pb2, store_pb2_grpc
from epdserve.services.rpc.status import error_of
from epdserve.services.store_types import (
    Deleted,
    FetchBatch,
    FetchRequest,
    FoundTail,
    OffloadRequest,
    OffloadResult,
    TailOffer,
    TailQuery,
    TierRun,
)
from epdserve.services.types import WorkerDescription


class StoreClient(WorkerClient):
    """Calls of a store.

    Beyond what the store itself refuses, every method raises ``WorkerLost`` if the store cannot be reached and
    ``DeadlineExceeded``.
    """

    def __init__(self, address: str, *, token: str, worker: str | None = None) -> None:
        super().__init__(address, token=token, worker=worker)
        self._stub = store_pb2_grpc.StoreStub(self._channel)

    async def offload(self, request: OffloadRequest, *, deadline_s: float) -> tuple[OffloadResult, ...]:
        """Offer blocks; what became of each. Their pages must stay as they are until this returns or raises.

        After an error other than a refusal the store may go on reading until the deadline: it verifies what it got,
        so that pages may be used again, but what it read then is lost.

        Raises:
            WorkerLost: The store knows no such life of the worker.
        """
        pb = convert.offload_to_pb(request)
        call = self._stub.Offload(pb, timeout=deadline_s, metadata=self._metadata)
        results = convert.results_from_pb(await called(call, worker=self.worker))
        if len(results) != len(request.blocks):
            raise InvalidRequest(f"{len(results)} results for {len(request.blocks)} blocks")
        return results

    async def locate(
        self,
        hashes: tuple[bytes, ...],
        *,
        exact: bool = False,
        local_only: bool = False,
        deadline_s: float,
    ) -> tuple[TierRun, ...]:
        """How far a chain is held, and where; promises nothing."""
        pb = store_pb2.LocateRequest(
            hashes=convert.hashes_to_bytes(hashes), exact=exact, local_only=local_only
        )
        call = self._stub.Locate(pb, timeout=deadline_s, metadata=self._metadata)
        return convert.runs_from_pb(await called(call, worker=self.worker))

    async def fetch(self, request: FetchRequest, *, deadline_s: float) -> AsyncGenerator[FetchBatch, None]:
        """Blocks of a chain in order, lent under one lease that ``end_fetch`` ends; none at all is a miss.

        Read each batch while the next one is brought up. Closing the generator before its end ends the lease: use
        ``max_blocks`` and ``max_wait_s`` to stop early and keep what has come. What was yielded before an error is
        still lent.

        Raises:
            Overloaded: Too many fetches are under way.
        """
        call = self._stub.Fetch(convert.fetch_to_pb(request), timeout=deadline_s, metadata=self._metadata)
        try:
            async with aclosing(_batches(call)) as batches:
                async for batch in batches:
                    yield batch
        except grpc.aio.AioRpcError as error:
            raise error_of(error, worker=self.worker) from None
        finally:
            call.cancel()  # nothing happens to one that is over

    async def end_fetch(
        self, lease: str, *, incarnation: str, suspects: tuple[bytes, ...] = (), deadline_s: float
    ) -> bool:
        """End the lease of a fetch or of a tail; whether it still held.

        Args:
            lease: Of a batch or a tail.
            incarnation: Of the store that gave it; another life of it says False.
            suspects: Hashes of blocks that were not the promised bytes: the store looks at its own again.
            deadline_s: Of the call.
        """
        pb = store_pb2.EndFetchRequest(
            lease=lease, incarnation=incarnation, suspects=convert.hashes_to_bytes(suspects)
        )
        call = self._stub.EndFetch(pb, timeout=deadline_s, metadata=self._metadata)
        return (await called(call, worker=self.worker)).held

    async def offload_tail(self, offer: TailOffer, *, deadline_s: float) -> OffloadResult:
        """Offer a tail; its slot must stay as it is until this returns or raises, as for ``offload``."""
        call = self._stub.OffloadTail(convert.offer_to_pb(offer), timeout=deadline_s, metadata=self._metadata)
        return convert.result_from_pb(await called(call, worker=self.worker))

    async def fetch_tail(self, query: TailQuery, *, deadline_s: float) -> FoundTail | None:
        """The longest tail of the first candidate that has one, lent under a lease; None is a miss."""
        call = self._stub.FetchTail(convert.query_to_pb(query), timeout=deadline_s, metadata=self._metadata)
        return convert.found_from_pb(await called(call, worker=self.worker))

    async def touch(self, hashes: tuple[bytes, ...], *, deadline_s: float) -> None:
        """Say that blocks were used elsewhere, so that the SSD tier does not age them."""
        pb = store_pb2.TouchRequest(hashes=convert.hashes_to_bytes(hashes))
        await called(self._stub.Touch(pb, timeout=deadline_s, metadata=self._metadata), worker=self.worker)

    async def delete_tenant(self, tenant: bytes, *, deadline_s: float) -> Deleted:
        """Delete for good what this store holds of a tenant (its label, see ``CacheOwner``)."""
        return await self._delete(store_pb2.DeleteRequest(tenant=tenant), deadline_s)

    async def delete_root(self, root: bytes, *, deadline_s: float) -> Deleted:
        """Delete for good what this store holds of a model."""
        return await self._delete(store_pb2.DeleteRequest(root=root), deadline_s)

    async def describe(self, *, deadline_s: float) -> WorkerDescription:
        """Facts of the store and the door to its memory."""
        call = self._stub.Describe(common_pb2.DescribeRequest(), timeout=deadline_s, metadata=self._metadata)
        return description_from_pb(await called(call, worker=self.worker))

    async def _delete(self, request: store_pb2.DeleteRequest, deadline_s: float) -> Deleted:
        call = self._stub.Delete(request, timeout=deadline_s, metadata=self._metadata)
        return convert.deleted_from_pb(await called(call, worker=self.worker))


async def _batches(
    call: grpc.aio.UnaryStreamCall[store_pb2.FetchRequest, store_pb2.FetchBatch],
) -> AsyncGenerator[FetchBatch, None]:
    while isinstance(message := await call.read(), store_pb2.FetchBatch):
        yield convert.batch_from_pb(message)
