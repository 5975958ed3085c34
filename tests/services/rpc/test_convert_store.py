from __future__ import annotations

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc import convert_store as convert
from epdserve.services.rpc.pb import store_pb2
from epdserve.services.store_types import (
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
from epdserve.services.types import BlockRef, TailRef, token_ids
from hypothesis import given
from hypothesis import strategies as st

text = st.text(max_size=20)
count = st.integers(0, 2**53)
small = st.integers(0, 2**32 - 1)
name = st.binary(min_size=16, max_size=16)
parent = st.none() | name
hashes = st.lists(name, max_size=5).map(tuple)
owners = st.builds(CacheOwner, name, st.binary(min_size=16, max_size=32))
refs = st.builds(BlockRef, count, count, name, st.integers(0, 2**64 - 1), st.booleans())
tails = st.builds(TailRef, count, count, count, st.integers(0, 2**64 - 1), st.booleans())
ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(token_ids)


@given(
    st.builds(
        OffloadRequest,
        text,
        text,
        owners,
        st.lists(st.builds(OffloadBlock, refs, parent), max_size=4).map(tuple),
        st.booleans(),
    )
)
def test_offers_come_back_equal(request: OffloadRequest) -> None:
    wire = convert.offload_to_pb(request).SerializeToString()
    assert convert.offload_from_pb(store_pb2.OffloadRequest.FromString(wire)) == request


@given(
    st.builds(FetchRequest, owners, hashes, parent, st.booleans(), count, st.booleans(), st.floats(0, 1e6))
)
def test_wishes_come_back_equal(request: FetchRequest) -> None:
    wire = convert.fetch_to_pb(request).SerializeToString()
    assert convert.fetch_from_pb(store_pb2.FetchRequest.FromString(wire)) == request


@given(
    st.builds(
        FetchBatch,
        text,
        text,
        st.lists(st.builds(FetchedBlock, refs, st.sampled_from(CacheTier)), max_size=4).map(tuple),
    )
)
def test_batches_come_back_equal(batch: FetchBatch) -> None:
    wire = convert.batch_to_pb(batch).SerializeToString()
    assert convert.batch_from_pb(store_pb2.FetchBatch.FromString(wire)) == batch


@given(st.builds(TailOffer, text, text, owners, tails, name, name, small, name))
def test_offered_tails_come_back_equal(offer: TailOffer) -> None:
    wire = convert.offer_to_pb(offer).SerializeToString()
    assert convert.offer_from_pb(store_pb2.OffloadTailRequest.FromString(wire)) == offer


@given(
    st.builds(
        TailQuery,
        owners,
        st.lists(st.builds(TailCandidate, name, ids), max_size=4).map(tuple),
        st.booleans(),
        st.booleans(),
    )
)
def test_questions_for_tails_come_back_equal(query: TailQuery) -> None:
    wire = convert.query_to_pb(query).SerializeToString()
    assert convert.query_from_pb(store_pb2.FetchTailRequest.FromString(wire)) == query


@given(st.none() | st.builds(FoundTail, text, text, tails, name, small, small, st.sampled_from(CacheTier)))
def test_found_tails_come_back_equal(found: FoundTail | None) -> None:
    wire = convert.found_to_pb(found).SerializeToString()
    assert convert.found_from_pb(store_pb2.FetchTailReply.FromString(wire)) == found


@given(
    st.lists(st.sampled_from(OffloadResult), max_size=5).map(tuple),
    st.lists(st.builds(TierRun, st.sampled_from(CacheTier), count), max_size=3).map(tuple),
    st.builds(Deleted, count, count, count),
)
def test_answers_come_back_equal(
    results: tuple[OffloadResult, ...], runs: tuple[TierRun, ...], deleted: Deleted
) -> None:
    assert convert.results_from_pb(convert.results_to_pb(results)) == results
    assert convert.runs_from_pb(convert.runs_to_pb(runs)) == runs
    assert convert.deleted_from_pb(convert.deleted_to_pb(deleted)) == deleted


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (store_pb2.FetchRequest(owner=store_pb2.CacheOwner(tenant=b"x", root=bytes(16))), "owner"),
        (
            store_pb2.FetchRequest(
                owner=store_pb2.CacheOwner(tenant=bytes(16), root=bytes(16)), hashes=bytes(17)
            ),
            "hashes",
        ),
        (
            store_pb2.FetchRequest(
                owner=store_pb2.CacheOwner(tenant=bytes(16), root=bytes(16)), parent=bytes(3)
            ),
            "parent",
        ),
        (
            store_pb2.FetchRequest(
                owner=store_pb2.CacheOwner(tenant=bytes(16), root=bytes(16)), max_wait_s=float("nan")
            ),
            "max_wait_s",
        ),
    ],
)
def test_what_no_client_of_ours_writes_is_refused(message: store_pb2.FetchRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        convert.fetch_from_pb(message)
    assert refused.value.param == param


def test_an_unknown_result_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        convert.results_from_pb(store_pb2.OffloadReply(results=[17]))
