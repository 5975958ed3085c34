from __future__ import annotations

import numpy as np
import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc import convert
from epdserve.services.rpc.pb import common_pb2, decode_pb2, prefill_pb2
from epdserve.services.types import (
    BlockRef,
    DecodeJob,
    DecodeReceipt,
    ErrorInfo,
    FinishReason,
    KVHandle,
    PrefillJob,
    PrefillResult,
    SamplingParams,
    TailRef,
    TokenChunk,
    token_ids,
)
from hypothesis import given
from hypothesis import strategies as st

text = st.text(max_size=20)
data = st.binary(max_size=32)
count = st.integers(0, 2**53)
checksum = st.integers(0, 2**64 - 1)
token = st.integers(0, 2**31 - 1)
number = st.floats(allow_nan=False)
tokens = st.lists(token, max_size=40).map(token_ids)

errors = st.builds(
    ErrorInfo, text, text, st.none() | text, st.none() | number, st.none() | text, st.none() | count
)
blocks = st.builds(BlockRef, count, count, data, checksum, st.booleans())
tails = st.builds(TailRef, count, count, count, checksum, st.booleans())
handles = st.builds(KVHandle, text, text, text, st.lists(blocks, max_size=4).map(tuple), tails, count)
samplings = st.builds(
    SamplingParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 1e30),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=token,
    min_p=st.floats(0, 1),
    stop_token_ids=st.lists(token, max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=token,
)
receipts = st.builds(
    DecodeReceipt, text, count, count, count, count, count, st.floats(0, 1e9), st.floats(0, 1e9), number
)


@given(errors)
def test_errors_come_back_equal(error: ErrorInfo) -> None:
    wire = convert.error_to_pb(error).SerializeToString()
    assert convert.error_from_pb(common_pb2.ErrorDetail.FromString(wire)) == error


@given(st.builds(PrefillJob, text, tokens, data, st.booleans(), text))
def test_prefill_jobs_come_back_equal(job: PrefillJob) -> None:
    wire = convert.prefill_job_to_pb(job).SerializeToString()
    assert convert.prefill_job_from_pb(prefill_pb2.PrefillJob.FromString(wire)) == job


@given(st.builds(PrefillResult, handles, count, count, count, number, number))
def test_prefill_results_come_back_equal(result: PrefillResult) -> None:
    wire = convert.prefill_result_to_pb(result).SerializeToString()
    assert convert.prefill_result_from_pb(prefill_pb2.PrefillResult.FromString(wire)) == result


@given(st.builds(DecodeJob, text, tokens, data, st.booleans(), samplings, st.none() | handles, tokens, text))
def test_decode_jobs_come_back_equal(job: DecodeJob) -> None:
    wire = convert.decode_job_to_pb(job).SerializeToString()
    assert convert.decode_job_from_pb(decode_pb2.DecodeJob.FromString(wire)) == job


@given(
    st.builds(
        TokenChunk,
        text,
        count,
        st.lists(token, max_size=8).map(tuple),
        st.none() | st.sampled_from(FinishReason),
        st.none() | errors,
        st.none() | receipts,
    )
)
def test_chunks_come_back_equal(chunk: TokenChunk) -> None:
    wire = convert.chunk_to_pb(chunk).SerializeToString()
    assert convert.chunk_from_pb(decode_pb2.TokenChunk.FromString(wire)) == chunk


def test_tokens_are_not_copied_on_arrival() -> None:
    wire = convert.tokens_to_bytes(token_ids(range(1000)))
    arrived = convert.tokens_from_bytes(wire)
    assert not arrived.flags.owndata
    assert not arrived.flags.writeable
    assert token_ids(arrived) is arrived


@pytest.mark.parametrize("wire", [b"abc", np.array([-1], "<i4").tobytes()], ids=["ragged", "negative"])
def test_tokens_nobody_sends_are_refused(wire: bytes) -> None:
    with pytest.raises(InvalidRequest):
        convert.tokens_from_bytes(wire)


def test_handle_without_a_tail_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tail"):
        convert.handle_from_pb(common_pb2.KVHandle(worker="w"))


def test_job_with_impossible_sampling_is_refused() -> None:
    pb = decode_pb2.DecodeJob(request_id="a", sampling=decode_pb2.SamplingParams(top_p=1.0))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        convert.decode_job_from_pb(pb)


def test_unknown_finish_reason_is_refused() -> None:
    pb = decode_pb2.TokenChunk(request_id="a")
    pb.finish_reason = 77  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="77"):
        convert.chunk_from_pb(pb)
