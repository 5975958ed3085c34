"""Sampling parameters, grammars and log-probabilities to protobuf and back; the rules are those of ``convert``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from epdserve.services.errors import InvalidRequest
from epdserve.services.rpc.pb import decode_pb2, prefill_pb2
from epdserve.services.sampling import Grammar, GrammarKind, PromptLogprobs, SamplingParams, TokenLogprob

_KIND_TO_PB: Final = {kind: decode_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_KIND_FROM_PB: Final = {number: kind for kind, number in _KIND_TO_PB.items()}


@contextmanager
def refused(param: str) -> Iterator[None]:
    """Values that no process of ours sends are the sender's fault.

    Raises:
        InvalidRequest: Instead of ``ValueError``.
    """
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(str(error), param=param) from error


def sampling_to_pb(sampling: SamplingParams) -> decode_pb2.SamplingParams:
    """Parameters as a message."""
    return decode_pb2.SamplingParams(
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        bias_tokens=[token for token, _ in sampling.logit_bias],
        bias_values=[bias for _, bias in sampling.logit_bias],
        logprobs=sampling.logprobs,
    )


def sampling_from_pb(pb: decode_pb2.SamplingParams) -> SamplingParams:
    """The parameters of a message."""
    with refused("sampling"):
        return SamplingParams(
            seed=pb.seed,
            max_tokens=pb.max_tokens,
            temperature=pb.temperature,
            top_p=pb.top_p,
            top_k=pb.top_k,
            min_p=pb.min_p,
            stop_token_ids=tuple(pb.stop_token_ids),
            ignore_eos=pb.ignore_eos,
            min_tokens=pb.min_tokens,
            presence_penalty=pb.presence_penalty,
            frequency_penalty=pb.frequency_penalty,
            repetition_penalty=pb.repetition_penalty or 1.0,
            logit_bias=tuple(zip(pb.bias_tokens, pb.bias_values, strict=True)),
            logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        )


def grammar_to_pb(grammar: Grammar) -> decode_pb2.Grammar:
    """A grammar as a message."""
    return decode_pb2.Grammar(
        kind=_KIND_TO_PB[grammar.kind],
        text=grammar.text,
        after_token=grammar.after_token,
        read_tokens=grammar.read_tokens,
        forbidden_before=grammar.forbidden_before,
    )


def grammar_from_pb(pb: decode_pb2.Grammar) -> Grammar:
    """The grammar of a message."""
    kind = _KIND_FROM_PB.get(pb.kind)
    if kind is None:
        raise InvalidRequest(f"unknown kind of grammar {pb.kind}", param="response_format")
    with refused("response_format"):
        after_token = pb.after_token if pb.HasField("after_token") else None
        return Grammar(kind, pb.text, after_token, pb.read_tokens, tuple(pb.forbidden_before))


def token_logprob_to_pb(value: TokenLogprob) -> decode_pb2.TokenLogprob:
    """Log-probabilities of one token as a message."""
    return decode_pb2.TokenLogprob(
        logprob=value.logprob,
        top_tokens=[token for token, _ in value.top],
        top_logprobs=[logprob for _, logprob in value.top],
    )


def token_logprob_from_pb(pb: decode_pb2.TokenLogprob) -> TokenLogprob:
    """The log-probabilities of a message."""
    with refused("logprobs"):
        return TokenLogprob(pb.logprob, tuple(zip(pb.top_tokens, pb.top_logprobs, strict=True)))


def prompt_logprobs_to_pb(value: PromptLogprobs) -> prefill_pb2.PromptLogprobs:
    """A prompt's log-probabilities as a message."""
    return prefill_pb2.PromptLogprobs(
        logprobs=value.logprobs.astype("<f4", copy=False).tobytes(),
        top_tokens=value.top_ids.astype("<i4", copy=False).tobytes(),
        top_logprobs=value.top_logprobs.astype("<f4", copy=False).tobytes(),
        top=value.top_ids.shape[1],
    )


def prompt_logprobs_from_pb(pb: prefill_pb2.PromptLogprobs) -> PromptLogprobs:
    """The log-probabilities of a message: read-only views of its bytes."""
    with refused("prompt_logprobs"):
        logprobs = np.frombuffer(pb.logprobs, dtype="<f4")
        rows = (len(logprobs), pb.top)
        return PromptLogprobs(
            logprobs,
            np.frombuffer(pb.top_tokens, dtype="<i4").reshape(rows),
            np.frombuffer(pb.top_logprobs, dtype="<f4").reshape(rows),
        )
