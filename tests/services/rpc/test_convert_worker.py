from __future__ import annotations

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc import convert_worker as convert
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
from hypothesis import given
from hypothesis import strategies as st

text = st.text(max_size=20)
count = st.integers(0, 2**53)
small = st.integers(0, 2**32 - 1)
hashes = st.lists(st.binary(min_size=16, max_size=16), max_size=5).map(tuple)

infos = st.builds(
    WorkerInfo,
    worker=text,
    role=st.sampled_from(WorkerRole),
    incarnation=text,
    address=text,
    metrics_address=text,
    state=st.sampled_from(WorkerState),
    cache_root=st.binary(max_size=32),
    block_tokens=small,
    max_context_tokens=count,
    queued_tokens=count,
    running=count,
    free_pages=count,
    total_pages=count,
    step_age_s=st.floats(0, 1e9),
    wire_version=small,
    model_name=text,
    machine=text,
    host_bytes_per_s=st.floats(0, 1e12),
    ssd_bytes_per_s=st.floats(0, 1e12),
    peer_bytes_per_s=st.floats(0, 1e12),
)
regions = st.builds(TransferRegion, text, st.integers(0, 2**64 - 1), count, count, st.integers(-1, 63))
endpoints = st.builds(
    TransferEndpoint, text, st.binary(max_size=50), st.lists(regions, max_size=3).map(tuple)
)


@given(infos)
def test_worker_records_come_back_equal(info: WorkerInfo) -> None:
    assert convert.info_from_bytes(convert.info_to_bytes(info)) == info


@given(st.builds(WorkerDescription, infos, endpoints))
def test_descriptions_come_back_equal(description: WorkerDescription) -> None:
    wire = convert.description_to_pb(description).SerializeToString()
    assert convert.description_from_pb(common_pb2.WorkerDescription.FromString(wire)) == description


@given(st.builds(BlockUpdate, text, st.booleans(), count, count, hashes, hashes))
def test_block_updates_come_back_equal(update: BlockUpdate) -> None:
    wire = convert.update_to_pb(update).SerializeToString()
    assert convert.update_from_pb(common_pb2.BlockUpdate.FromString(wire)) == update


def test_update_with_hashes_of_two_lengths_is_our_bug() -> None:
    with pytest.raises(ValueError, match="lengths"):
        convert.update_to_pb(BlockUpdate("1", True, 0, 1, (b"a", b"bb"), ()))


@pytest.mark.parametrize("size", [0, 3])
def test_update_that_is_no_whole_number_of_hashes_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest):
        convert.update_from_pb(common_pb2.BlockUpdate(added=b"abcd", hash_bytes=size))


@pytest.mark.parametrize("wire", [b"\xff\xff", b""], ids=["no message", "no role"])
def test_bytes_that_are_no_record_are_refused(wire: bytes) -> None:
    with pytest.raises(InvalidRequest):
        convert.info_from_bytes(wire)
