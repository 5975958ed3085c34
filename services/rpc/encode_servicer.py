"""The Encode service over a handler: convert, call, map errors."""

from __future__ import annotations

import grpc
from epdserve.services.rpc import convert_encode as convert
from epdserve.services.rpc.convert_worker import description_to_pb
from epdserve.services.rpc.handlers import EncodeHandler
from epdserve.services.rpc.pb import common_pb2, encode_pb2, encode_pb2_grpc
from epdserve.services.rpc.server import RpcServer, new_server, start_server
from epdserve.services.rpc.servicers import Context, guarded

_NO_LIMIT_S = 60.0  # for a caller that set none


class EncodeServicer(encode_pb2_grpc.EncodeServicer):
    """The Encode service over a handler."""

    def __init__(self, handler: EncodeHandler) -> None:
        self._handler = handler

    async def Run(  # noqa: N802 - named by the proto
        self, request: encode_pb2.EncodeJob, context: Context
    ) -> encode_pb2.EncodeResult:
        """Have images ready."""

        async def run() -> encode_pb2.EncodeResult:
            return convert.result_to_pb(await self._handler.encode(convert.job_from_pb(request)))

        return await guarded(context, run())

    async def Lend(  # noqa: N802
        self, request: encode_pb2.EmbeddingWish, context: Context
    ) -> encode_pb2.LentEmbeddings:
        """Lend embeddings."""

        async def run() -> encode_pb2.LentEmbeddings:
            deadline_s = context.time_remaining()
            wish = convert.wish_from_pb(request)
            return convert.lent_to_pb(await self._handler.lend(wish, deadline_s=deadline_s or _NO_LIMIT_S))

        return await guarded(context, run())

    async def EndLoan(  # noqa: N802
        self, request: encode_pb2.EndLoanRequest, context: Context
    ) -> encode_pb2.EndLoanReply:
        """End a lease."""
        work = self._handler.end_loan(request.lease, incarnation=request.incarnation)
        return encode_pb2.EndLoanReply(held=await guarded(context, work))

    async def Describe(  # noqa: N802
        self, request: common_pb2.DescribeRequest, context: Context
    ) -> common_pb2.WorkerDescription:
        """Facts of the worker."""
        return description_to_pb(await guarded(context, self._handler.describe()))

    def end_watches(self) -> None:
        """There are none."""


def add_encode(handler: EncodeHandler, server: grpc.aio.Server) -> None:
    """Let a server that has not started embed images too."""
    encode_pb2_grpc.add_EncodeServicer_to_server(EncodeServicer(handler), server)


async def serve_encode(handler: EncodeHandler, *, token: str, address: str = "127.0.0.1:0") -> RpcServer:
    """Serve an encode worker; arguments as for ``serve_prefill``.

    Raises:
        Unavailable: The address cannot be bound.
    """
    server = new_server(token)
    servicer = EncodeServicer(handler)
    encode_pb2_grpc.add_EncodeServicer_to_server(servicer, server)
    return RpcServer(server, await start_server(server, address), servicer)
