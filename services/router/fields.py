"""Fields of request bodies that several protocols share, checked where they enter.

A field that would change the answer and is not served is refused by name (``refuse_unserved``); a field nobody knows
is ignored and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar

import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.options import MAX_COMPLETION_TOKENS, UINT64_MAX
from epdserve.services.router.slo import LONGEST_TARGET_S, SloWish
from epdserve.services.router.tenancy.body_limits import BodyLimits
from epdserve.services.sampling import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from epdserve.services.schedule import HIGHEST_PRIORITY
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

MOST_STOPS: Final = 16
LONGEST_STOP: Final = 1024

StopString = Annotated[StrictStr, Field(min_length=1, max_length=LONGEST_STOP)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenCount = Annotated[StrictInt, Field(ge=1, le=MAX_COMPLETION_TOKENS)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Top = Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)]


class Part(BaseModel):
    """A nested object of a body; unknown fields in it are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class StreamOptions(Part):
    """``stream_options``."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class Body(BaseModel):
    """Any body; unknown fields land in ``model_extra``.

    Attributes:
        unserved: Tests for values that ask for what is not served, by field.
        objects: Fields that are objects.
        words: What a field takes, where pydantic's words are about our classes or one half of a union; dotted names.
    """

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True, protected_namespaces=())

    unserved: ClassVar[Mapping[str, Callable[[Any], bool]]] = {}
    objects: ClassVar[frozenset[str]] = frozenset({"stream_options"})
    words: ClassVar[Mapping[str, str]] = {
        "stream_options": 'an object such as {"include_usage": true}',
    }

    model: StrictStr
    stream: StrictBool | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=0, le=UINT64_MAX)] | None = None
    user: StrictStr | None = None
    user_id: StrictStr | None = None
    cache_salt: StrictStr | None = None
    exact: StrictBool | None = None
    deterministic: StrictBool | None = None
    receipt: StrictBool | None = None
    deadline_s: Annotated[Number, Field(gt=0)] | None = None
    slo_class: StrictStr | None = None
    ttft_target_s: Annotated[Number, Field(ge=1e-3, le=LONGEST_TARGET_S)] | None = None
    tpot_target_s: Annotated[Number, Field(ge=1e-6, le=LONGEST_TARGET_S)] | None = None
    priority: Annotated[StrictInt, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)] | None = None

    @property
    def unknown(self) -> int:
        """How many fields of the body nobody knows."""
        return sum(name not in self.unserved for name in self.model_extra or ())

    def common(self) -> dict[str, Any]:
        """The fields above as ``Options`` names them."""
        return {
            "model": self.model,
            "stream": bool(self.stream),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(0, self.top_k or 0),
            "min_p": self.min_p or 0.0,
            "seed": self.seed,
            "user": self.user_id or self.user or "",
            "cache_salt": self.cache_salt or "",
            "exact": bool(self.exact),
            "deterministic": bool(self.deterministic),
            "receipt": bool(self.receipt),
            "deadline_s": self.deadline_s,
            "slo": SloWish(self.slo_class, self.ttft_target_s, self.tpot_target_s, self.priority),
        }


class SamplingBody(Body):
    """What chat and raw completions have in common beyond that."""

    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1)] | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_COMPLETION_TOKENS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[StrictStr, Number], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: StrictBool | None = None
    ignore_eos: StrictBool | None = None
    prompt_logprobs: Top | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage event."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """Whether every event carries the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def common(self) -> dict[str, Any]:
        """The fields above as ``Options`` names them."""
        return {
            **super().common(),
            "n": self.n or 1,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens or 0,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "logit_bias": _biases(self.logit_bias or {}),
            "stops": self.stops,
            "include_stop": bool(self.include_stop_str_in_output),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "ignore_eos": bool(self.ignore_eos),
            "prompt_logprobs": self.prompt_logprobs,
        }


def _biases(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 11 and int(name) < 2**31):
            raise InvalidRequest("logit_bias takes token ids as keys", param="logit_bias")
        if not -100 <= bias <= 100:
            raise InvalidRequest("logit_bias takes values from -100 to 100", param="logit_bias")
        biases[int(name)] = bias
    return tuple(biases.items())


def unless(*neutral: object) -> Callable[[Any], bool]:
    """True for values that ask for something; None never does. 0 is not False here."""
    return lambda value: value is not None and not any(value == n and type(value) is type(n) for n in neutral)


BodyT = TypeVar("BodyT", bound=Body)


def parse_json(raw: bytes, limits: BodyLimits) -> Any:
    """The value of a body.

    Raises:
        InvalidRequest: Not valid JSON, or more of something than ``limits`` let in; the message names a reason and a
            place, never the content.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    # Brackets in the text bound the depth
    limits.check(value, may_be_deep=raw.count(b"{") + raw.count(b"[") > limits.depth)
    return value


def parse_body(kind: type[BodyT], value: object) -> BodyT:
    """A checked body.

    Raises:
        InvalidRequest: A wrong type, a value out of range, or a field that is not served; ``param`` names it.
    """
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name, asks in kind.unserved.items():
        if name in value and asks(value[name]):
            raise InvalidRequest(f"{name} is not supported by this server with this value", param=name)
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error, kind) from None
    if body.user_id is not None and len(body.user_id.encode()) > 512:
        raise InvalidRequest("user_id is limited to 512 bytes", param="user_id")
    if getattr(body, "stream_options", None) is not None and body.stream is not True:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")
    return body


def _first_problem(error: ValidationError, kind: type[Body]) -> InvalidRequest:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    # Of a union's complaints, the one whose type did fit says what is wrong
    problem = next((p for p in problems if not p["type"].endswith("_type")), problems[0])
    names = [str(part) for part in problem["loc"]]
    if not names:
        return InvalidRequest(f"Invalid body: {problem['msg']}")
    field = names[0]
    if field in kind.objects and len(names) > 1:
        place = f"{field}.{names[1]}"
        if place in kind.words:
            return InvalidRequest(f"{place} must be {kind.words[place]}", param=field)
        return InvalidRequest(f"Invalid '{place}': {problem['msg']}", param=field)
    if field in kind.words:
        return InvalidRequest(f"{field} must be {kind.words[field]}", param=field)
    # Deeper parts of the place are pydantic's names of union members; the field and an index say enough
    place = "".join([field, *(f"[{name}]" for name in names[1:] if name.isdigit())])
    return InvalidRequest(f"Invalid '{place}': {problem['msg']}", param=field)
