"""How tokens are drawn, what constrains them, and what is told about them. Frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_TOP_LOGPROBS: Final = 20
MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 256

_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn and when a request ends.

    Order of what is done to the logits of a row: ``repetition_penalty``, ``presence_penalty`` and
    ``frequency_penalty``, ``logit_bias``, what the grammar and ``min_tokens`` forbid, ``temperature``, ``top_k``,
    ``top_p``, ``min_p``. Log-probabilities are those of the model, before any of it.

    Attributes:
        temperature: 0 takes the largest logit, lowest id on ties.
        top_k: 0 keeps all.
        seed: int64; with the position it determines the draw.
        max_tokens: Tokens this request may produce in all, resumed ones included.
        min_tokens: No stop token ends the request before this many tokens.
        presence_penalty: Taken once from the logit of every token of the output so far.
        frequency_penalty: Taken from it for each time the token occurs there.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output.
        logit_bias: (token id, what is added to its logit), each id once; -inf forbids a token.
        logprobs: Alternatives told with each token's log-probability; None = nothing is told.
    """

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not -_INT64_MAX - 1 <= self.seed <= _INT64_MAX:
            raise ValueError(f"seed does not fit 64 bits: {self.seed}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0 or not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], min_p in [0, 1]: {self.top_p}, {self.min_p}")
        if not 0 <= self.top_k <= _INT32_MAX or not 0 <= self.min_tokens <= _INT32_MAX:
            raise ValueError(f"top_k and min_tokens must be >= 0, got {self.top_k}, {self.min_tokens}")
        if not 1 <= self.max_tokens <= _INT32_MAX:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if any(not 0 <= token <= _INT32_MAX for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids outside [0, 2**31): {self.stop_token_ids}")
        if not (isfinite(self.presence_penalty) and isfinite(self.frequency_penalty)):
            raise ValueError(f"penalties must be finite: {self.presence_penalty}, {self.frequency_penalty}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be finite and > 0, got {self.repetition_penalty}")
        _check_bias(self.logit_bias)
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"logprobs must lie in 0..{MAX_TOP_LOGPROBS}, got {self.logprobs}")

    @property
    def penalised(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of one of ``n`` choices: those of a request of its own with the seed ``seed + index``."""
        if index == 0:
            return self
        seed = (self.seed + index + _INT64_MAX + 1) % 2**64 - _INT64_MAX - 1
        return replace(self, seed=seed)


def _check_bias(logit_bias: tuple[tuple[int, float], ...]) -> None:
    if not logit_bias:
        return
    if len(logit_bias) > MAX_LOGIT_BIASES:
        raise ValueError(f"{len(logit_bias)} logit biases, at most {MAX_LOGIT_BIASES} are taken")
    ids = [token for token, _ in logit_bias]
    if len(set(ids)) != len(ids) or any(not 0 <= token <= _INT32_MAX for token in ids):
        raise ValueError("logit_bias needs ids in [0, 2**31), each once")
    if any(not (isfinite(bias) or bias == float("-inf")) for _, bias in logit_bias):
        raise ValueError("a logit bias must be finite, or -inf")


class GrammarKind(StrEnum):
    """Languages a grammar may be written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"  # llguidance's dialect: <[id]> is the token of that id


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request's output must look like.

    Attributes:
        text: In the language ``kind``.
        after_token: Output is free up to and with the first token of this id; None = constrained from the start.
        read_tokens: How many of the prompt's last tokens the grammar has to have read: an answer that is continued.
        forbidden_before: Tokens that are not drawn while output is still free: an end, or markup that goes past
            ``after_token``.
    """

    kind: GrammarKind
    text: str
    after_token: int | None = None
    read_tokens: int = 0
    forbidden_before: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.after_token is not None and not 0 <= self.after_token <= _INT32_MAX:
            raise ValueError(f"after_token outside [0, 2**31): {self.after_token}")
        if self.read_tokens < 0 or (self.read_tokens and self.after_token is not None):
            raise ValueError(f"read_tokens={self.read_tokens} with after_token={self.after_token}")
        if any(not 0 <= token <= _INT32_MAX or token == self.after_token for token in self.forbidden_before):
            raise ValueError(f"forbidden_before={self.forbidden_before} with after_token={self.after_token}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a drawn token, and of the likeliest tokens in its place.

    Values are float32 numbers, as the model gives them; the wire holds no more.

    Attributes:
        top: (token id, log-probability), likeliest first, lower id first on ties.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from the second on, given those before. N = prompt tokens.

    Attributes:
        logprobs: (N - 1,) float32.
        top_ids: (N - 1, k) int32, likeliest first.
        top_logprobs: (N - 1, k) float32.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        return (
            np.array_equal(self.logprobs, other.logprobs)
            and np.array_equal(self.top_ids, other.top_ids)
            and np.array_equal(self.top_logprobs, other.top_logprobs)
        )
