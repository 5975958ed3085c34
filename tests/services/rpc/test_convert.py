from __future__ import annotations

import numpy as np
import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc import convert
from epdserve.services.rpc.convert_schedule import schedule_from_pb
from epdserve.services.rpc.pb import common_pb2, decode_pb2, prefill_pb2
from epdserve.services.sampling import Grammar, GrammarKind, PromptLogprobs, TokenLogprob
from epdserve.services.schedule import HIGHEST_PRIORITY, MAX_LENGTHS, UNHURRIED, Schedule
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
    TokenSources,
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
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    logit_bias=st.dictionaries(token, st.floats(-100, 100) | st.just(float("-inf")), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    logprobs=st.none() | st.integers(0, 20),
)
finite = st.floats(0, 1e9)
schedules = st.just(UNHURRIED) | st.builds(
    Schedule,
    finite,
    finite,
    st.integers(-HIGHEST_PRIORITY, HIGHEST_PRIORITY),
    st.floats(-1, 1e6),
    st.lists(finite, max_size=MAX_LENGTHS).map(tuple),
)
grammars = st.builds(
    Grammar, st.sampled_from(GrammarKind), text, st.just(7), st.just(0), st.just((1, 2**31 - 1))
) | st.builds(Grammar, st.sampled_from(GrammarKind), text, st.none(), token)
logprob = st.floats(max_value=0, allow_nan=False, width=32)
token_logprobs = st.builds(TokenLogprob, logprob, st.lists(st.tuples(token, logprob), max_size=3).map(tuple))


def _prompt_logprobs(shape: tuple[int, int]) -> PromptLogprobs:
    draw = np.random.default_rng(shape[0])
    ids = draw.integers(0, 2**31 - 1, shape).astype(np.int32)
    return PromptLogprobs(-draw.random(shape[0], np.float32), ids, -draw.random(shape, np.float32))


prompt_logprobs = st.tuples(st.integers(0, 4), st.integers(0, 3)).map(_prompt_logprobs)
sources = st.builds(TokenSources, count, count, count, count, count, count)
receipts = st.builds(DecodeReceipt, text, count, count, count, count, count, number, number, number, sources)


@given(errors)
def test_errors_come_back_equal(error: ErrorInfo) -> None:
    wire = convert.error_to_pb(error).SerializeToString()
    assert convert.error_from_pb(common_pb2.ErrorDetail.FromString(wire)) == error


@given(
    st.builds(PrefillJob, text, tokens, data, st.booleans(), text, st.integers(1, 128), schedule=schedules)
    | st.builds(
        PrefillJob,
        text,
        st.just(range(9)),
        data,
        st.just(True),
        text,
        st.just(1),
        st.none() | st.integers(0, 20),
        st.none() | st.integers(1, 8),
    )
)
def test_prefill_jobs_come_back_equal(job: PrefillJob) -> None:
    wire = convert.prefill_job_to_pb(job).SerializeToString()
    assert convert.prefill_job_from_pb(prefill_pb2.PrefillJob.FromString(wire)) == job


@given(
    st.builds(
        PrefillResult,
        handles,
        count,
        count,
        count,
        number,
        number,
        st.lists(text, max_size=3).map(tuple),
        st.none() | prompt_logprobs,
        sources,
    )
)
def test_prefill_results_come_back_equal(result: PrefillResult) -> None:
    wire = convert.prefill_result_to_pb(result).SerializeToString()
    assert convert.prefill_result_from_pb(prefill_pb2.PrefillResult.FromString(wire)) == result


@given(
    st.builds(
        DecodeJob,
        text,
        tokens,
        data,
        st.booleans(),
        samplings,
        st.none() | handles,
        tokens,
        text,
        st.none() | grammars,
        st.none() | st.floats(0, 1e9, exclude_min=True),
        st.booleans(),
        schedule=schedules,
    )
)
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
    | st.builds(
        lambda tokens, logprobs: TokenChunk("r", 0, (tokens,) * len(logprobs), logprobs=tuple(logprobs)),
        token,
        st.lists(token_logprobs, max_size=3),
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


def test_what_older_routers_send_means_no_penalty_and_one_reader() -> None:
    sampling = decode_pb2.SamplingParams(max_tokens=1, top_p=1.0)
    job = convert.decode_job_from_pb(decode_pb2.DecodeJob(request_id="a", sampling=sampling))
    assert not job.sampling.penalised
    assert job.grammar is job.timeout_s is job.sampling.logprobs is None
    assert convert.prefill_job_from_pb(prefill_pb2.PrefillJob(request_id="a")).readers == 1


@pytest.mark.parametrize(
    "pb",
    [
        decode_pb2.DecodeJob(grammar=decode_pb2.Grammar(text="a")),
        decode_pb2.DecodeJob(timeout_s=0.0),
        decode_pb2.DecodeJob(sampling=decode_pb2.SamplingParams(max_tokens=1, top_p=1.0, bias_tokens=[1])),
    ],
    ids=["grammar of no kind", "no time", "bias without value"],
)
def test_jobs_nobody_sends_are_refused(pb: decode_pb2.DecodeJob) -> None:
    if not pb.sampling.max_tokens:
        pb.sampling.MergeFrom(decode_pb2.SamplingParams(max_tokens=1, top_p=1.0))
    with pytest.raises(InvalidRequest):
        convert.decode_job_from_pb(pb)


def test_logprobs_of_other_tokens_are_refused() -> None:
    pb = decode_pb2.TokenChunk(request_id="a", tokens=[1, 2], logprobs=[decode_pb2.TokenLogprob(logprob=-1)])
    with pytest.raises(InvalidRequest, match="log-probabilities"):
        convert.chunk_from_pb(pb)


def test_prompt_logprobs_of_another_shape_are_refused() -> None:
    pb = prefill_pb2.PromptLogprobs(logprobs=b"0000", top_tokens=b"00000000", top=1)
    with pytest.raises(InvalidRequest):
        convert.prefill_result_from_pb(
            prefill_pb2.PrefillResult(
                handle=common_pb2.KVHandle(tail=common_pb2.TailRef()), prompt_logprobs=pb
            )
        )


@pytest.mark.parametrize(
    "pb",
    [
        common_pb2.Schedule(target_s=float("nan")),
        common_pb2.Schedule(waited_s=-1.0),
        common_pb2.Schedule(priority=101),
        common_pb2.Schedule(lengths=[1.0] * 65),
        common_pb2.Schedule(excess=float("inf")),
    ],
    ids=str,
)
def test_impossible_schedules_are_refused(pb: common_pb2.Schedule) -> None:
    with pytest.raises(InvalidRequest):
        schedule_from_pb(pb)
