"""The Store service over a handler: convert, call, map errors."""

from __future__ import annotations

from contextlib import aclosing

from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc import convert_store as convert
from epdserve.services.rpc.handlers import StoreHandler
from epdserve.services.rpc.pb import store_pb2, store_pb2_grpc
from epdserve.services.rpc.server import RpcServer, new_server, start_server
from epdserve.services.rpc.servicers import Context, WorkerServicer, guarded
from epdserve.services.store_types import Deleted


# gRPC takes a coroutine that writes for a streaming method; the generated types know only generators
class StoreServicer(WorkerServicer, store_pb2_grpc.StoreServicer):  # type: ignore[misc]
    """The Store service over a handler."""

    def __init__(self, handler: StoreHandler) -> None:
        super().__init__(handler)
        self._handler = handler

    async def Offload(  # noqa: N802 - named by the proto
        self, request: store_pb2.OffloadRequest, context: Context
    ) -> store_pb2.OffloadReply:
        """Read blocks out of a worker's pages."""

        async def run() -> store_pb2.OffloadReply:
            offer = convert.offload_from_pb(request)
            results = await self._handler.offload(offer, deadline_s=context.time_remaining())
            return convert.results_to_pb(results)

        return await guarded(context, run())

    async def Locate(  # noqa: N802
        self, request: store_pb2.LocateRequest, context: Context
    ) -> store_pb2.LocateReply:
        """How far a chain is held."""

        async def run() -> store_pb2.LocateReply:
            hashes = convert.hashes_from_bytes(request.hashes)
            runs = await self._handler.locate(hashes, exact=request.exact, local_only=request.local_only)
            return convert.runs_to_pb(runs)

        return await guarded(context, run())

    async def Fetch(  # type: ignore[override]  # noqa: N802
        self, request: store_pb2.FetchRequest, context: Context
    ) -> None:
        """Lend a chain; gRPC cancels this task when the caller goes or its deadline passes."""

        async def run() -> None:
            wish = convert.fetch_from_pb(request)
            async with aclosing(self._handler.fetch(wish, deadline_s=context.time_remaining())) as batches:
                async for batch in batches:
                    await context.write(convert.batch_to_pb(batch))

        await guarded(context, run())

    async def EndFetch(  # noqa: N802
        self, request: store_pb2.EndFetchRequest, context: Context
    ) -> store_pb2.EndFetchReply:
        """End a lease."""

        async def run() -> store_pb2.EndFetchReply:
            held = await self._handler.end_fetch(
                request.lease,
                incarnation=request.incarnation,
                suspects=convert.hashes_from_bytes(request.suspects),
            )
            return store_pb2.EndFetchReply(held=held)

        return await guarded(context, run())

    async def OffloadTail(  # noqa: N802
        self, request: store_pb2.OffloadTailRequest, context: Context
    ) -> store_pb2.OffloadTailReply:
        """Read a tail out of a worker's slot."""

        async def run() -> store_pb2.OffloadTailReply:
            offer = convert.offer_from_pb(request)
            result = await self._handler.offload_tail(offer, deadline_s=context.time_remaining())
            return convert.result_to_pb(result)

        return await guarded(context, run())

    async def FetchTail(  # noqa: N802
        self, request: store_pb2.FetchTailRequest, context: Context
    ) -> store_pb2.FetchTailReply:
        """Lend the longest tail that fits."""

        async def run() -> store_pb2.FetchTailReply:
            query = convert.query_from_pb(request)
            return convert.found_to_pb(
                await self._handler.fetch_tail(query, deadline_s=context.time_remaining())
            )

        return await guarded(context, run())

    async def Touch(  # noqa: N802
        self, request: store_pb2.TouchRequest, context: Context
    ) -> store_pb2.TouchReply:
        """Note that blocks were used."""

        async def run() -> store_pb2.TouchReply:
            await self._handler.touch(convert.hashes_from_bytes(request.hashes))
            return store_pb2.TouchReply()

        return await guarded(context, run())

    async def Delete(  # noqa: N802
        self, request: store_pb2.DeleteRequest, context: Context
    ) -> store_pb2.DeleteReply:
        """Delete a tenant's or a model's bytes."""

        async def run() -> store_pb2.DeleteReply:
            return convert.deleted_to_pb(await self._delete(request))

        return await guarded(context, run())

    async def _delete(self, request: store_pb2.DeleteRequest) -> Deleted:
        match request.WhichOneof("what"):
            case "tenant":
                return await self._handler.delete_tenant(request.tenant)
            case "root":
                return await self._handler.delete_root(request.root)
        raise InvalidRequest("neither tenant nor root is named", param="what")


async def serve_store(handler: StoreHandler, *, token: str, address: str = "127.0.0.1:0") -> RpcServer:
    """Serve a store; arguments as for ``serve_prefill``.

    Raises:
        Unavailable: The address cannot be bound.
    """
    server = new_server(token)
    servicer = StoreServicer(handler)
    store_pb2_grpc.add_StoreServicer_to_server(servicer, server)
    return RpcServer(server, await start_server(server, address), servicer)
