"""Blocks in a worker's own pages, lent to other machines' stores: both ends of the Pages service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import grpc
from epdserve.services.rpc.client import WorkerClient, called
from epdserve.services.rpc.convert_store import hashes_from_bytes, hashes_to_bytes, ref_from_pb, ref_to_pb
from epdserve.services.rpc.pb import pages_pb2, pages_pb2_grpc
from epdserve.services.rpc.servicers import Context, guarded
from epdserve.services.types import BlockRef


@dataclass(frozen=True, slots=True)
class LentPages:
    """Blocks in a worker's region ``pages``, as they are while the lease holds. Without blocks there is no lease."""

    lease: str
    incarnation: str
    blocks: tuple[BlockRef, ...]


@runtime_checkable
class PagesHandler(Protocol):
    """A worker that lends its pages."""

    async def lend_blocks(self, hashes: tuple[bytes, ...], *, exact: bool) -> LentPages:
        """Lend the longest held part of a chain."""
        ...

    async def return_blocks(self, lease: str, *, incarnation: str) -> bool:
        """End a lease; whether it still held."""
        ...

    async def forget_blocks(self) -> int:
        """Let go of every block; how many were found before."""
        ...


class PagesServicer(pages_pb2_grpc.PagesServicer):
    """The Pages service over a handler."""

    def __init__(self, handler: PagesHandler) -> None:
        self._handler = handler

    async def Lend(  # noqa: N802 - named by the proto
        self, request: pages_pb2.LendRequest, context: Context
    ) -> pages_pb2.LendReply:
        """Lend blocks."""

        async def run() -> pages_pb2.LendReply:
            hashes = hashes_from_bytes(request.hashes)
            lent = await self._handler.lend_blocks(hashes, exact=request.exact)
            blocks = [ref_to_pb(ref) for ref in lent.blocks]
            return pages_pb2.LendReply(lease=lent.lease, incarnation=lent.incarnation, blocks=blocks)

        return await guarded(context, run())

    async def Return(  # noqa: N802
        self, request: pages_pb2.ReturnRequest, context: Context
    ) -> pages_pb2.ReturnReply:
        """End a lease."""
        work = self._handler.return_blocks(request.lease, incarnation=request.incarnation)
        return pages_pb2.ReturnReply(held=await guarded(context, work))

    async def Forget(  # noqa: N802
        self, request: pages_pb2.ForgetRequest, context: Context
    ) -> pages_pb2.ForgetReply:
        """Let go of every block."""
        return pages_pb2.ForgetReply(blocks=await guarded(context, self._handler.forget_blocks()))


def add_pages(handler: object, server: grpc.aio.Server) -> None:
    """Serve a worker's pages beside the rest, if it lends them."""
    if isinstance(handler, PagesHandler):
        pages_pb2_grpc.add_PagesServicer_to_server(PagesServicer(handler), server)


async def lend_blocks(
    client: WorkerClient, hashes: tuple[bytes, ...], *, exact: bool, deadline_s: float
) -> LentPages:
    """Borrow blocks from a worker's pages: the longest part of a chain that it holds.

    Raises:
        ServiceError: It does not answer, or lends nothing to anybody.
    """
    stub = pages_pb2_grpc.PagesStub(client.channel)
    request = pages_pb2.LendRequest(hashes=hashes_to_bytes(hashes), exact=exact)
    call = stub.Lend(request, timeout=deadline_s, metadata=client.metadata)
    reply = await called(call, worker=client.worker)
    return LentPages(reply.lease, reply.incarnation, tuple(ref_from_pb(ref) for ref in reply.blocks))


async def return_blocks(client: WorkerClient, lent: LentPages, *, deadline_s: float) -> bool:
    """Say that borrowed blocks have been read; whether the lease still held."""
    stub = pages_pb2_grpc.PagesStub(client.channel)
    request = pages_pb2.ReturnRequest(lease=lent.lease, incarnation=lent.incarnation)
    call = stub.Return(request, timeout=deadline_s, metadata=client.metadata)
    return (await called(call, worker=client.worker)).held


async def forget_blocks(client: WorkerClient, *, deadline_s: float) -> int:
    """Have a worker let go of every block in its pages; how many there were.

    Raises:
        ServiceError: It does not answer.
    """
    stub = pages_pb2_grpc.PagesStub(client.channel)
    call = stub.Forget(pages_pb2.ForgetRequest(), timeout=deadline_s, metadata=client.metadata)
    return int((await called(call, worker=client.worker)).blocks)
