"""What is said to a store, to protobuf and back; the rules are those of ``rpc.convert``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc.convert import tokens_from_bytes, tokens_to_bytes
from epdserve.services.rpc.pb import common_pb2, store_pb2
from epdserve.services.store_types import (
    HASH_BYTES,
    CacheOwner,
    CacheTier,
    Deleted,
    FetchBatch,
    FetchedBlock,
    FetchRequest,
    FoundTail,
    OffloadBlock,
    OffloadRequest,
    OffloadResult,
    TailCandidate,
    TailOffer,
    TailQuery,
    TierRun,
)
from epdserve.services.types import BlockRef, TailRef

T = TypeVar("T")

_TIER_TO_PB: Final = {tier: store_pb2.CacheTier.Value(f"CACHE_TIER_{tier.name}") for tier in CacheTier}
_TIER_FROM_PB: Final[dict[int, CacheTier]] = {number: tier for tier, number in _TIER_TO_PB.items()}
_RESULT_TO_PB: Final = {
    result: store_pb2.OffloadResult.Value(f"OFFLOAD_RESULT_{result.name}") for result in OffloadResult
}
_RESULT_FROM_PB: Final[dict[int, OffloadResult]] = {
    number: result for result, number in _RESULT_TO_PB.items()
}


def hashes_to_bytes(hashes: tuple[bytes, ...]) -> bytes:
    """Hashes one after the other.

    Raises:
        ValueError: One that has not 16 bytes.
    """
    if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
        raise ValueError(f"hashes have {HASH_BYTES} bytes")
    return b"".join(hashes)


def hashes_from_bytes(data: bytes) -> tuple[bytes, ...]:
    """The hashes of ``hashes_to_bytes``."""
    if len(data) % HASH_BYTES:
        raise InvalidRequest(f"{len(data)} bytes are no whole number of hashes", param="hashes")
    return tuple(data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))


def offload_to_pb(request: OffloadRequest) -> store_pb2.OffloadRequest:
    """An offer of blocks as a message."""
    blocks = [
        store_pb2.OffloadBlock(ref=ref_to_pb(block.ref), parent=block.parent or b"")
        for block in request.blocks
    ]
    return store_pb2.OffloadRequest(
        worker=request.worker,
        incarnation=request.incarnation,
        owner=_owner_to_pb(request.owner),
        blocks=blocks,
        running=request.running,
    )


def offload_from_pb(pb: store_pb2.OffloadRequest) -> OffloadRequest:
    """The offer of a message."""
    blocks = tuple(OffloadBlock(ref_from_pb(block.ref), _parent_from_pb(block.parent)) for block in pb.blocks)
    return OffloadRequest(pb.worker, pb.incarnation, _owner_from_pb(pb.owner), blocks, pb.running)


def results_to_pb(results: tuple[OffloadResult, ...]) -> store_pb2.OffloadReply:
    """What became of each block, as a message."""
    return store_pb2.OffloadReply(results=[_RESULT_TO_PB[result] for result in results])


def results_from_pb(pb: store_pb2.OffloadReply) -> tuple[OffloadResult, ...]:
    """What became of each block."""
    return tuple(_known(_RESULT_FROM_PB, result, "result") for result in pb.results)


def runs_to_pb(runs: tuple[TierRun, ...]) -> store_pb2.LocateReply:
    """Where a chain lies, as a message."""
    return store_pb2.LocateReply(
        runs=[store_pb2.TierRun(tier=_TIER_TO_PB[run.tier], blocks=run.blocks) for run in runs]
    )


def runs_from_pb(pb: store_pb2.LocateReply) -> tuple[TierRun, ...]:
    """Where a chain lies."""
    return tuple(TierRun(_known(_TIER_FROM_PB, run.tier, "tier"), run.blocks) for run in pb.runs)


def fetch_to_pb(request: FetchRequest) -> store_pb2.FetchRequest:
    """A wish for a chain as a message."""
    return store_pb2.FetchRequest(
        owner=_owner_to_pb(request.owner),
        hashes=hashes_to_bytes(request.hashes),
        parent=request.parent or b"",
        exact=request.exact,
        max_blocks=request.max_blocks,
        local_only=request.local_only,
        max_wait_s=request.max_wait_s,
    )


def fetch_from_pb(pb: store_pb2.FetchRequest) -> FetchRequest:
    """The wish of a message."""
    if not 0.0 <= pb.max_wait_s < float("inf"):
        raise InvalidRequest(f"max_wait_s is {pb.max_wait_s}", param="max_wait_s")
    return FetchRequest(
        owner=_owner_from_pb(pb.owner),
        hashes=hashes_from_bytes(pb.hashes),
        parent=_parent_from_pb(pb.parent),
        exact=pb.exact,
        max_blocks=pb.max_blocks,
        local_only=pb.local_only,
        max_wait_s=pb.max_wait_s,
    )


def batch_to_pb(batch: FetchBatch) -> store_pb2.FetchBatch:
    """Lent blocks as a message."""
    blocks = [
        store_pb2.FetchedBlock(ref=ref_to_pb(block.ref), tier=_TIER_TO_PB[block.tier])
        for block in batch.blocks
    ]
    return store_pb2.FetchBatch(lease=batch.lease, incarnation=batch.incarnation, blocks=blocks)


def batch_from_pb(pb: store_pb2.FetchBatch) -> FetchBatch:
    """The lent blocks of a message."""
    blocks = tuple(
        FetchedBlock(ref_from_pb(block.ref), _known(_TIER_FROM_PB, block.tier, "tier")) for block in pb.blocks
    )
    return FetchBatch(pb.lease, pb.incarnation, blocks)


def offer_to_pb(offer: TailOffer) -> store_pb2.OffloadTailRequest:
    """An offer of a tail as a message."""
    return store_pb2.OffloadTailRequest(
        worker=offer.worker,
        incarnation=offer.incarnation,
        owner=_owner_to_pb(offer.owner),
        tail=_tail_to_pb(offer.tail),
        identity=offer.identity,
        parent=offer.parent,
        after_tokens=offer.after_tokens,
        rest=offer.rest,
    )


def offer_from_pb(pb: store_pb2.OffloadTailRequest) -> TailOffer:
    """The offer of a message."""
    for field, value in (("identity", pb.identity), ("parent", pb.parent), ("rest", pb.rest)):
        _sixteen(field, value)
    return TailOffer(
        worker=pb.worker,
        incarnation=pb.incarnation,
        owner=_owner_from_pb(pb.owner),
        tail=_tail_from_pb(pb.tail),
        identity=pb.identity,
        parent=pb.parent,
        after_tokens=pb.after_tokens,
        rest=pb.rest,
    )


def result_to_pb(result: OffloadResult) -> store_pb2.OffloadTailReply:
    """What became of a tail, as a message."""
    return store_pb2.OffloadTailReply(result=_RESULT_TO_PB[result])


def result_from_pb(pb: store_pb2.OffloadTailReply) -> OffloadResult:
    """What became of a tail."""
    return _known(_RESULT_FROM_PB, pb.result, "result")


def query_to_pb(query: TailQuery) -> store_pb2.FetchTailRequest:
    """A question for a tail as a message."""
    candidates = [
        store_pb2.TailCandidate(parent=candidate.parent, after=tokens_to_bytes(candidate.after))
        for candidate in query.candidates
    ]
    return store_pb2.FetchTailRequest(
        owner=_owner_to_pb(query.owner),
        candidates=candidates,
        exact=query.exact,
        local_only=query.local_only,
    )


def query_from_pb(pb: store_pb2.FetchTailRequest) -> TailQuery:
    """The question of a message."""
    candidates = tuple(
        TailCandidate(_sixteen("parent", candidate.parent), tokens_from_bytes(candidate.after))
        for candidate in pb.candidates
    )
    return TailQuery(_owner_from_pb(pb.owner), candidates, pb.exact, pb.local_only)


def found_to_pb(found: FoundTail | None) -> store_pb2.FetchTailReply:
    """A tail that is lent, or none, as a message."""
    if found is None:
        return store_pb2.FetchTailReply()
    return store_pb2.FetchTailReply(
        found=store_pb2.FoundTail(
            lease=found.lease,
            incarnation=found.incarnation,
            tail=_tail_to_pb(found.tail),
            identity=found.identity,
            candidate=found.candidate,
            after_tokens=found.after_tokens,
            tier=_TIER_TO_PB[found.tier],
        )
    )


def found_from_pb(pb: store_pb2.FetchTailReply) -> FoundTail | None:
    """The tail of a message, if there is one."""
    if not pb.HasField("found"):
        return None
    found = pb.found
    return FoundTail(
        lease=found.lease,
        incarnation=found.incarnation,
        tail=_tail_from_pb(found.tail),
        identity=_sixteen("identity", found.identity),
        candidate=found.candidate,
        after_tokens=found.after_tokens,
        tier=_known(_TIER_FROM_PB, found.tier, "tier"),
    )


def deleted_to_pb(deleted: Deleted) -> store_pb2.DeleteReply:
    """What was deleted, as a message."""
    return store_pb2.DeleteReply(
        host_blocks=deleted.host_blocks, ssd_blocks=deleted.ssd_blocks, tails=deleted.tails
    )


def deleted_from_pb(pb: store_pb2.DeleteReply) -> Deleted:
    """What was deleted."""
    return Deleted(pb.host_blocks, pb.ssd_blocks, pb.tails)


def ref_to_pb(ref: BlockRef) -> common_pb2.BlockRef:
    """A block's place as a message."""
    return common_pb2.BlockRef(
        page=ref.page,
        generation=ref.generation,
        block_hash=ref.block_hash,
        checksum=ref.checksum,
        exact=ref.exact,
    )


def ref_from_pb(pb: common_pb2.BlockRef) -> BlockRef:
    """The place of a message."""
    return BlockRef(pb.page, pb.generation, _sixteen("block_hash", pb.block_hash), pb.checksum, pb.exact)


def _tail_to_pb(tail: TailRef) -> common_pb2.TailRef:
    return common_pb2.TailRef(
        slot=tail.slot,
        generation=tail.generation,
        nbytes=tail.nbytes,
        checksum=tail.checksum,
        exact=tail.exact,
    )


def _tail_from_pb(pb: common_pb2.TailRef) -> TailRef:
    return TailRef(pb.slot, pb.generation, pb.nbytes, pb.checksum, pb.exact)


def _owner_to_pb(owner: CacheOwner) -> store_pb2.CacheOwner:
    return store_pb2.CacheOwner(tenant=owner.tenant, root=owner.root)


def _owner_from_pb(pb: store_pb2.CacheOwner) -> CacheOwner:
    try:
        return CacheOwner(pb.tenant, pb.root)
    except ValueError as error:
        raise InvalidRequest(str(error), param="owner") from error


def _parent_from_pb(data: bytes) -> bytes | None:
    return _sixteen("parent", data) if data else None


def _sixteen(field: str, data: bytes) -> bytes:
    if len(data) != HASH_BYTES:
        raise InvalidRequest(f"{field} has {len(data)} bytes and not {HASH_BYTES}", param=field)
    return data


def _known(names: Mapping[int, T], number: int, field: str) -> T:
    if number not in names:
        raise InvalidRequest(f"unknown {field} {number}", param=field)
    return names[number]
