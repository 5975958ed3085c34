"""Jobs, handles and chunks to protobuf and back, total both ways: what comes back equals what went in.

``*_from_pb`` raises ``InvalidRequest`` for a message that no version of ours writes. Enums are matched by
name: a value that is not known here is refused rather than taken for its neighbour.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc.convert_encode import placed_from_pb, placed_to_pb
from epdserve.services.rpc.convert_sampling import (
    grammar_from_pb,
    grammar_to_pb,
    prompt_logprobs_from_pb,
    prompt_logprobs_to_pb,
    refused,
    sampling_from_pb,
    sampling_to_pb,
    token_logprob_from_pb,
    token_logprob_to_pb,
)
from epdserve.services.rpc.convert_schedule import schedule_from_pb, schedule_to_pb
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
    TailRef,
    TokenChunk,
    TokenIds,
    TokenSources,
)

_FINISH_TO_PB: Final = {
    why: decode_pb2.FinishReason.Value(f"FINISH_REASON_{why.name}") for why in FinishReason
}
_FINISH_FROM_PB: Final = {number: why for why, number in _FINISH_TO_PB.items()}


def tokens_to_bytes(tokens: TokenIds) -> bytes:
    """Token ids as little-endian int32, the form they have in memory already."""
    return tokens.astype("<i4", copy=False).tobytes()


def tokens_from_bytes(data: bytes) -> TokenIds:
    """Token ids of ``tokens_to_bytes``: a read-only view of the bytes.

    Raises:
        InvalidRequest: Not a whole number of ids, or a negative one.
    """
    if len(data) % 4:
        raise InvalidRequest(f"{len(data)} bytes are no whole number of token ids", param="tokens")
    tokens: TokenIds = np.frombuffer(data, dtype="<i4")
    if tokens.size and int(tokens.min()) < 0:
        raise InvalidRequest("negative token id", param="tokens")
    return tokens


def error_to_pb(error: ErrorInfo) -> common_pb2.ErrorDetail:
    """An error as a message; an absent field stays absent."""
    return common_pb2.ErrorDetail(
        code=error.code,
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
        worker=error.worker,
        tokens_delivered=error.tokens_delivered,
    )


def error_from_pb(pb: common_pb2.ErrorDetail) -> ErrorInfo:
    """The error of a message."""
    return ErrorInfo(
        code=pb.code,
        message=pb.message,
        param=pb.param if pb.HasField("param") else None,
        retry_after_s=pb.retry_after_s if pb.HasField("retry_after_s") else None,
        worker=pb.worker if pb.HasField("worker") else None,
        tokens_delivered=pb.tokens_delivered if pb.HasField("tokens_delivered") else None,
    )


def handle_to_pb(handle: KVHandle) -> common_pb2.KVHandle:
    """A handle as a message."""
    tail = handle.tail
    return common_pb2.KVHandle(
        worker=handle.worker,
        incarnation=handle.incarnation,
        lease=handle.lease,
        blocks=[
            common_pb2.BlockRef(
                page=block.page,
                generation=block.generation,
                block_hash=block.block_hash,
                checksum=block.checksum,
                exact=block.exact,
            )
            for block in handle.blocks
        ],
        tail=common_pb2.TailRef(
            slot=tail.slot,
            generation=tail.generation,
            nbytes=tail.nbytes,
            checksum=tail.checksum,
            exact=tail.exact,
        ),
        tokens=handle.tokens,
    )


def handle_from_pb(pb: common_pb2.KVHandle) -> KVHandle:
    """The handle of a message."""
    if not pb.HasField("tail"):
        raise InvalidRequest("handle without a tail", param="handle")
    blocks = tuple(
        BlockRef(block.page, block.generation, block.block_hash, block.checksum, block.exact)
        for block in pb.blocks
    )
    tail = TailRef(pb.tail.slot, pb.tail.generation, pb.tail.nbytes, pb.tail.checksum, pb.tail.exact)
    return KVHandle(pb.worker, pb.incarnation, pb.lease, blocks, tail, pb.tokens)


def prefill_job_to_pb(job: PrefillJob) -> prefill_pb2.PrefillJob:
    """A prefill job as a message."""
    return prefill_pb2.PrefillJob(
        request_id=job.request_id,
        tokens=tokens_to_bytes(job.tokens),
        tenant_key=job.tenant_key,
        exact=job.exact,
        trace=job.trace,
        readers=job.readers,
        prompt_logprobs=job.prompt_logprobs,
        tail_at=job.tail_at,
        images=placed_to_pb(job.images),
        schedule=schedule_to_pb(job.schedule),
        deterministic=job.deterministic,
    )


def prefill_job_from_pb(pb: prefill_pb2.PrefillJob) -> PrefillJob:
    """The prefill job of a message."""
    with refused("n"):
        return PrefillJob(
            pb.request_id,
            tokens_from_bytes(pb.tokens),
            pb.tenant_key,
            pb.exact,
            pb.trace,
            pb.readers or 1,
            pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
            pb.tail_at if pb.HasField("tail_at") else None,
            placed_from_pb(pb.images),
            schedule_from_pb(pb.schedule),
            pb.deterministic,
        )


def prefill_result_to_pb(result: PrefillResult) -> prefill_pb2.PrefillResult:
    """A prefill result as a message."""
    return prefill_pb2.PrefillResult(
        handle=handle_to_pb(result.handle),
        cached_tokens=result.cached_tokens,
        replayed_rows=result.replayed_rows,
        computed_tokens=result.computed_tokens,
        queue_ms=result.queue_ms,
        run_ms=result.run_ms,
        more_leases=result.more_leases,
        prompt_logprobs=(
            None if result.prompt_logprobs is None else prompt_logprobs_to_pb(result.prompt_logprobs)
        ),
        sources=_sources_to_pb(result.sources),
    )


def prefill_result_from_pb(pb: prefill_pb2.PrefillResult) -> PrefillResult:
    """The prefill result of a message."""
    return PrefillResult(
        handle=handle_from_pb(pb.handle),
        cached_tokens=pb.cached_tokens,
        replayed_rows=pb.replayed_rows,
        computed_tokens=pb.computed_tokens,
        queue_ms=pb.queue_ms,
        run_ms=pb.run_ms,
        more_leases=tuple(pb.more_leases),
        prompt_logprobs=(
            prompt_logprobs_from_pb(pb.prompt_logprobs) if pb.HasField("prompt_logprobs") else None
        ),
        sources=_sources_from_pb(pb.sources),
    )


def decode_job_to_pb(job: DecodeJob) -> decode_pb2.DecodeJob:
    """A decode job as a message."""
    return decode_pb2.DecodeJob(
        request_id=job.request_id,
        tokens=tokens_to_bytes(job.tokens),
        tenant_key=job.tenant_key,
        exact=job.exact,
        sampling=sampling_to_pb(job.sampling),
        handle=None if job.handle is None else handle_to_pb(job.handle),
        emitted=tokens_to_bytes(job.emitted),
        trace=job.trace,
        grammar=None if job.grammar is None else grammar_to_pb(job.grammar),
        timeout_s=job.timeout_s,
        forget_tail=not job.keep_tail,
        images=placed_to_pb(job.images),
        schedule=schedule_to_pb(job.schedule),
        deterministic=job.deterministic,
    )


def decode_job_from_pb(pb: decode_pb2.DecodeJob) -> DecodeJob:
    """The decode job of a message."""
    with refused("sampling"):
        return DecodeJob(
            request_id=pb.request_id,
            tokens=tokens_from_bytes(pb.tokens),
            tenant_key=pb.tenant_key,
            exact=pb.exact,
            sampling=sampling_from_pb(pb.sampling),
            handle=handle_from_pb(pb.handle) if pb.HasField("handle") else None,
            emitted=tokens_from_bytes(pb.emitted),
            trace=pb.trace,
            grammar=grammar_from_pb(pb.grammar) if pb.HasField("grammar") else None,
            timeout_s=pb.timeout_s if pb.HasField("timeout_s") else None,
            keep_tail=not pb.forget_tail,
            images=placed_from_pb(pb.images),
            schedule=schedule_from_pb(pb.schedule),
            deterministic=pb.deterministic,
        )


def chunk_to_pb(chunk: TokenChunk) -> decode_pb2.TokenChunk:
    """A chunk as a message."""
    pb = decode_pb2.TokenChunk(request_id=chunk.request_id, offset=chunk.offset, tokens=chunk.tokens)
    if chunk.logprobs:
        pb.logprobs.extend(map(token_logprob_to_pb, chunk.logprobs))
    if chunk.finish_reason is not None:
        pb.finish_reason = _FINISH_TO_PB[chunk.finish_reason]
    if chunk.error is not None:
        pb.error.CopyFrom(error_to_pb(chunk.error))
    if chunk.receipt is not None:
        pb.receipt.CopyFrom(_receipt_to_pb(chunk.receipt))
    return pb


def chunk_from_pb(pb: decode_pb2.TokenChunk) -> TokenChunk:
    """The chunk of a message."""
    finish = None
    if pb.finish_reason != decode_pb2.FINISH_REASON_UNSPECIFIED:
        finish = _FINISH_FROM_PB.get(pb.finish_reason)
        if finish is None:
            raise InvalidRequest(f"unknown finish reason {pb.finish_reason}", param="finish_reason")
    if pb.logprobs and len(pb.logprobs) != len(pb.tokens):
        raise InvalidRequest(f"{len(pb.logprobs)} log-probabilities of {len(pb.tokens)} tokens")
    return TokenChunk(
        request_id=pb.request_id,
        offset=pb.offset,
        tokens=tuple(pb.tokens),
        finish_reason=finish,
        error=error_from_pb(pb.error) if pb.HasField("error") else None,
        receipt=_receipt_from_pb(pb.receipt) if pb.HasField("receipt") else None,
        logprobs=tuple(map(token_logprob_from_pb, pb.logprobs)),
    )


def _receipt_to_pb(receipt: DecodeReceipt) -> decode_pb2.DecodeReceipt:
    return decode_pb2.DecodeReceipt(
        worker=receipt.worker,
        pulled_tokens=receipt.pulled_tokens,
        own_tokens=receipt.own_tokens,
        recomputed_tokens=receipt.recomputed_tokens,
        steps=receipt.steps,
        preemptions=receipt.preemptions,
        queue_ms=receipt.queue_ms,
        handoff_ms=receipt.handoff_ms,
        decode_ms=receipt.decode_ms,
        sources=_sources_to_pb(receipt.sources),
    )


def _receipt_from_pb(pb: decode_pb2.DecodeReceipt) -> DecodeReceipt:
    return DecodeReceipt(
        worker=pb.worker,
        pulled_tokens=pb.pulled_tokens,
        own_tokens=pb.own_tokens,
        recomputed_tokens=pb.recomputed_tokens,
        steps=pb.steps,
        preemptions=pb.preemptions,
        queue_ms=pb.queue_ms,
        handoff_ms=pb.handoff_ms,
        decode_ms=pb.decode_ms,
        sources=_sources_from_pb(pb.sources),
    )


def _sources_to_pb(sources: TokenSources) -> common_pb2.TokenSources:
    return common_pb2.TokenSources(
        device=sources.device,
        tail=sources.tail,
        host=sources.host,
        ssd=sources.ssd,
        peer=sources.peer,
        computed=sources.computed,
    )


def _sources_from_pb(pb: common_pb2.TokenSources) -> TokenSources:
    return TokenSources(pb.device, pb.tail, pb.host, pb.ssd, pb.peer, pb.computed)
