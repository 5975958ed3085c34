"""A worker's facts and its block events to protobuf and back; the rules are those of ``rpc.convert``."""

from __future__ import annotations

from typing import Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc.pb import common_pb2
from epdserve.services.types import (
    BlockUpdate,
    TransferEndpoint,
    TransferRegion,
    WorkerDescription,
    WorkerInfo,
    WorkerRole,
    WorkerState,
)
from google.protobuf.message import DecodeError

_ROLE_TO_PB: Final = {role: common_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.name}") for role in WorkerRole}
_ROLE_FROM_PB: Final = {number: role for role, number in _ROLE_TO_PB.items()}
_STATE_TO_PB: Final = {
    state: common_pb2.WorkerState.Value(f"WORKER_STATE_{state.name}") for state in WorkerState
}
_STATE_FROM_PB: Final = {number: state for state, number in _STATE_TO_PB.items()}


def info_to_pb(info: WorkerInfo) -> common_pb2.WorkerRecord:
    """A worker's facts as a message."""
    return common_pb2.WorkerRecord(
        worker=info.worker,
        role=_ROLE_TO_PB[info.role],
        incarnation=info.incarnation,
        address=info.address,
        metrics_address=info.metrics_address,
        state=_STATE_TO_PB[info.state],
        cache_root=info.cache_root,
        block_tokens=info.block_tokens,
        max_context_tokens=info.max_context_tokens,
        queued_tokens=info.queued_tokens,
        running=info.running,
        free_pages=info.free_pages,
        total_pages=info.total_pages,
        step_age_s=info.step_age_s,
        wire_version=info.wire_version,
        model_name=info.model_name,
        machine=info.machine,
        encodes=info.encodes,
        deterministic_root=info.deterministic_root,
        host_bytes_per_s=info.host_bytes_per_s,
        ssd_bytes_per_s=info.ssd_bytes_per_s,
        peer_bytes_per_s=info.peer_bytes_per_s,
    )


def info_from_pb(pb: common_pb2.WorkerRecord) -> WorkerInfo:
    """The worker's facts of a message."""
    role, state = _ROLE_FROM_PB.get(pb.role), _STATE_FROM_PB.get(pb.state)
    if role is None or state is None:
        raise InvalidRequest(f"worker {pb.worker!r} with unknown role {pb.role} or state {pb.state}")
    return WorkerInfo(
        worker=pb.worker,
        role=role,
        incarnation=pb.incarnation,
        address=pb.address,
        metrics_address=pb.metrics_address,
        state=state,
        cache_root=pb.cache_root,
        block_tokens=pb.block_tokens,
        max_context_tokens=pb.max_context_tokens,
        queued_tokens=pb.queued_tokens,
        running=pb.running,
        free_pages=pb.free_pages,
        total_pages=pb.total_pages,
        step_age_s=pb.step_age_s,
        wire_version=pb.wire_version,
        model_name=pb.model_name,
        machine=pb.machine,
        encodes=pb.encodes,
        deterministic_root=pb.deterministic_root,
        host_bytes_per_s=pb.host_bytes_per_s,
        ssd_bytes_per_s=pb.ssd_bytes_per_s,
        peer_bytes_per_s=pb.peer_bytes_per_s,
    )


def info_to_bytes(info: WorkerInfo) -> bytes:
    """A registry record."""
    return info_to_pb(info).SerializeToString()


def info_from_bytes(data: bytes) -> WorkerInfo:
    """The worker's facts of a registry record.

    Raises:
        InvalidRequest: Not a record, or one with a role or state that is not known here.
    """
    try:
        return info_from_pb(common_pb2.WorkerRecord.FromString(data))
    except DecodeError as error:
        raise InvalidRequest(f"{len(data)} bytes are no worker record") from error


def description_to_pb(description: WorkerDescription) -> common_pb2.WorkerDescription:
    """A description as a message."""
    endpoint = description.endpoint
    regions = [
        common_pb2.TransferRegion(
            name=region.name,
            address=region.address,
            stride=region.stride,
            count=region.count,
            device_id=region.device_id,
        )
        for region in endpoint.regions
    ]
    return common_pb2.WorkerDescription(
        info=info_to_pb(description.info),
        endpoint=common_pb2.TransferEndpoint(
            agent=endpoint.agent, metadata=endpoint.metadata, regions=regions
        ),
    )


def description_from_pb(pb: common_pb2.WorkerDescription) -> WorkerDescription:
    """The description of a message."""
    regions = tuple(
        TransferRegion(region.name, region.address, region.stride, region.count, region.device_id)
        for region in pb.endpoint.regions
    )
    endpoint = TransferEndpoint(pb.endpoint.agent, pb.endpoint.metadata, regions)
    return WorkerDescription(info_from_pb(pb.info), endpoint)


def update_to_pb(update: BlockUpdate, *, more: bool = False) -> common_pb2.BlockUpdate:
    """A block update as a message; all hashes must have one length."""
    lengths = {len(block_hash) for block_hash in (*update.added, *update.removed)}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"block hashes of lengths {sorted(lengths)} in one update")
    return common_pb2.BlockUpdate(
        incarnation=update.incarnation,
        snapshot=update.snapshot,
        more=more,
        first_seq=update.first_seq,
        next_seq=update.next_seq,
        added=b"".join(update.added),
        removed=b"".join(update.removed),
        hash_bytes=lengths.pop() if lengths else 0,
        digest=update.digest,
    )


def update_from_pb(pb: common_pb2.BlockUpdate) -> BlockUpdate:
    """The block update of a message."""
    return BlockUpdate(
        incarnation=pb.incarnation,
        snapshot=pb.snapshot,
        first_seq=pb.first_seq,
        next_seq=pb.next_seq,
        added=_split(pb.added, pb.hash_bytes),
        removed=_split(pb.removed, pb.hash_bytes),
        digest=pb.digest,
    )


def _split(data: bytes, size: int) -> tuple[bytes, ...]:
    if not data:
        return ()
    if size <= 0 or len(data) % size:
        raise InvalidRequest(f"{len(data)} bytes are no whole number of {size}-byte hashes")
    return tuple(data[at : at + size] for at in range(0, len(data), size))
