"""A worker's block events as one endless iterator: reconnects, and never hands on an update that does not fit.

After every (re)connection the worker sends a snapshot first, so an interrupted watch costs a snapshot and nothing
else. Between snapshots the sequence numbers must follow one another; where they do not, the watch starts anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, TypeAlias

import grpc
from epdserve.services.errors import InvalidRequest, ServiceError
from epdserve.services.rpc.auth import token_metadata
from epdserve.services.rpc.channel import open_channel
from epdserve.services.rpc.convert_worker import update_from_pb
from epdserve.services.rpc.pb import common_pb2, decode_pb2_grpc, prefill_pb2_grpc, store_pb2_grpc
from epdserve.services.types import BlockUpdate, WorkerRole

log = logging.getLogger(__name__)

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
MAX_SNAPSHOT_HASHES: Final = 64 * 2**20  # 1 GB; a worker with more than that is mistaken
FIRST_UPDATE_S: Final = 30.0  # from the call to its snapshot, and between parts of one
_CLOSE_S: Final = 2.0

_STUBS: Final = {
    WorkerRole.PREFILL: prefill_pb2_grpc.PrefillStub,
    WorkerRole.DECODE: decode_pb2_grpc.DecodeStub,
    WorkerRole.STORE: store_pb2_grpc.StoreStub,
}

UpdateCall: TypeAlias = grpc.aio.UnaryStreamCall[common_pb2.WatchBlocksRequest, common_pb2.BlockUpdate]


async def watch_blocks(address: str, *, role: WorkerRole, token: str) -> AsyncGenerator[BlockUpdate, None]:
    """Block updates of a worker, for as long as the caller iterates; close the generator to stop.

    The first update of each connection is a snapshot. A worker that is away yields nothing and raises nothing: its
    death is the registry's business, and whoever hears of it closes the watch.

    Args:
        address: ``host:port``, from the registry.
        role: PREFILL, DECODE or STORE.
        token: The cluster token.
    """
    backoff_s = BACKOFF_MIN_S
    while True:
        try:
            async with aclosing(_watch_once(address, role, token)) as updates:
                async for update in updates:
                    backoff_s = BACKOFF_MIN_S
                    yield update
            reason = "ended"
        except grpc.aio.AioRpcError as error:
            reason = error.code().name
        except (ServiceError, TimeoutError) as error:
            reason = type(error).__name__
        log.debug("block watch interrupted", extra={"address": address, "reason": reason})
        await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
        backoff_s = min(backoff_s * 2, BACKOFF_MAX_S)


async def _watch_once(address: str, role: WorkerRole, token: str) -> AsyncGenerator[BlockUpdate, None]:
    channel = open_channel(address)
    try:
        stub = _STUBS[role](channel)
        # no deadline on the call: the watch lasts; keepalive pings notice a dead peer
        call = stub.WatchBlocks(common_pb2.WatchBlocksRequest(), metadata=token_metadata(token))
        async with asyncio.timeout(FIRST_UPDATE_S):
            first = await call.read()
        last: BlockUpdate | None = None
        added = 0  # since the last snapshot; whoever only ever adds would fill this process
        while isinstance(first, common_pb2.BlockUpdate):
            update = await _whole(call, first)
            if not update.snapshot and not _follows(update, last):
                log.warning("block events have a gap", extra={"address": address})
                return
            added = len(update.added) + (0 if update.snapshot else added)
            if added > 2 * MAX_SNAPSHOT_HASHES:
                log.info(
                    "many blocks since the last snapshot: another is asked for", extra={"address": address}
                )
                return
            yield update
            # the hashes of a snapshot need not live as long as the watch
            last = replace(update, added=(), removed=())
            first = await call.read()
    finally:
        async with asyncio.timeout(_CLOSE_S):
            await channel.close(None)


def _follows(update: BlockUpdate, last: BlockUpdate | None) -> bool:
    return last is not None and update.first_seq == last.next_seq and update.incarnation == last.incarnation


async def _whole(call: UpdateCall, first: common_pb2.BlockUpdate) -> BlockUpdate:
    """The update that begins with a message: that message, or a snapshot put together from its parts."""
    update, more = update_from_pb(first), first.more
    added = list(update.added)
    while more:
        async with asyncio.timeout(FIRST_UPDATE_S):
            part = await call.read()
        if not isinstance(part, common_pb2.BlockUpdate) or not part.snapshot:
            raise InvalidRequest("a snapshot of blocks breaks off")
        added.extend(update_from_pb(part).added)
        if len(added) > MAX_SNAPSHOT_HASHES:
            raise InvalidRequest(f"a snapshot of more than {MAX_SNAPSHOT_HASHES} blocks")
        more = part.more
    return replace(update, added=tuple(added))
