"""The body of a chat request, checked where it enters.

Messages, tools and formats are checked by the recipe; everything else here. A field that would change the answer
and is not served yet is refused by name (``_NOT_SERVED``); a field nobody knows is ignored and counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.effort import EFFORTS_TAKEN, SWITCHES_TAKEN
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

MAX_COMPLETION_TOKENS: Final = 393_216
_MAX_STOP_IDS: Final = 256
_UINT64_MAX: Final = 2**64 - 1

StopString = Annotated[StrictStr, Field(min_length=1, max_length=1024)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenCount = Annotated[StrictInt, Field(ge=1, le=MAX_COMPLETION_TOKENS)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)


class ThinkingSwitch(_Part):
    """``thinking``."""

    type: StrictStr


class StreamOptions(_Part):
    """``stream_options``."""

    include_usage: StrictBool | None = None


class TemplateArguments(_Part):
    """``chat_template_kwargs`` as vLLM and SGLang take them."""

    thinking: StrictBool | None = None
    enable_thinking: StrictBool | None = None
    reasoning_effort: StrictStr | StrictInt | None = None


class ChatBody(BaseModel):
    """``POST /v1/chat/completions``. Unknown fields land in ``model_extra``."""

    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True, protected_namespaces=())

    model: StrictStr
    messages: list[dict[str, Any]]
    thinking: ThinkingSwitch | None = None
    reasoning_effort: StrictStr | StrictInt | None = None
    chat_template_kwargs: TemplateArguments | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0, le=MAX_COMPLETION_TOKENS)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=0, le=_UINT64_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(max_length=_MAX_STOP_IDS)] | None
    ) = None
    ignore_eos: StrictBool | None = None
    user: StrictStr | None = None
    user_id: StrictStr | None = None
    cache_salt: StrictStr | None = None
    exact: StrictBool | None = None
    receipt: StrictBool | None = None
    effort_floor: Annotated[StrictInt, Field(ge=1, le=100)] | None = None
    deadline_s: Annotated[Number, Field(gt=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def completion_limit(self) -> int | None:
        """What the caller asked for; ``max_tokens`` wins over its newer name."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def thinking_switch(self) -> str | None:
        """``thinking.type``, else what the template arguments say."""
        if self.thinking is not None:
            return self.thinking.type
        extra = self.chat_template_kwargs
        chosen = (
            None if extra is None else extra.thinking if extra.thinking is not None else extra.enable_thinking
        )
        return None if chosen is None else "enabled" if chosen else "disabled"

    @property
    def asked_effort(self) -> str | int | None:
        """``reasoning_effort``, else what the template arguments say."""
        if self.reasoning_effort is not None or self.chat_template_kwargs is None:
            return self.reasoning_effort
        return self.chat_template_kwargs.reasoning_effort

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage event."""
        return self.stream_options is not None and self.stream_options.include_usage is True


def _unless(*neutral: object) -> Callable[[Any], bool]:
    """True for values that ask for something; None never does. 0 is not False here."""
    return lambda value: value is not None and not any(value == n and type(value) is type(n) for n in neutral)


def _asks_for_format(value: Any) -> bool:
    return value is not None and not (isinstance(value, dict) and value.get("type") == "text")


_NOT_SERVED: Final[dict[str, Callable[[Any], bool]]] = {
    "n": _unless(1),
    "best_of": _unless(1),
    "logprobs": _unless(False),
    "top_logprobs": _unless(0),
    "prompt_logprobs": _unless(),
    "response_format": _asks_for_format,
    "parallel_tool_calls": _unless(True),
    "frequency_penalty": _unless(0, 0.0),
    "presence_penalty": _unless(0, 0.0),
    "repetition_penalty": _unless(1, 1.0),
    "logit_bias": _unless({}),
    "bad_words": _unless([]),
    "functions": _unless([]),
    "function_call": _unless("none", "auto"),
    "modalities": _unless(["text"]),
    "audio": _unless(),
    "web_search_options": _unless(),
    "structured_outputs": _unless(),
    "guided_json": _unless(),
    "guided_regex": _unless(),
    "guided_choice": _unless(),
    "guided_grammar": _unless(),
    "regex": _unless(),
    "ebnf": _unless(),
    "json_schema": _unless(),
    "include_stop_str_in_output": _unless(False),
    "skip_special_tokens": _unless(True),
    "continue_final_message": _unless(False),
    "add_generation_prompt": _unless(True),
    "echo": _unless(False),
    "thinking_token_budget": _unless(),
    "return_token_ids": _unless(False),
    "deterministic": _unless(False),
}


def parse_chat_body(value: object) -> ChatBody:
    """A checked body.

    Raises:
        InvalidRequest: A wrong type, a value out of range, or a field that is not served; ``param`` names it.
    """
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name, asks in _NOT_SERVED.items():
        if name in value and asks(value[name]):
            raise InvalidRequest(f"{name} is not supported by this server yet with this value", param=name)
    if isinstance(value.get("tool_choice"), dict) or value.get("tool_choice") == "required":
        raise InvalidRequest(
            "tool_choice: only none and auto are supported by this server yet", param="tool_choice"
        )
    try:
        body = ChatBody.model_validate(value)
    except ValidationError as error:
        raise _first_problem(error) from None
    if body.stream_options is not None and body.stream is not True:
        raise InvalidRequest("stream_options needs stream = true", param="stream_options")
    if body.user_id is not None and len(body.user_id.encode()) > 512:
        raise InvalidRequest("user_id is limited to 512 bytes", param="user_id")
    return body


def unknown_fields(body: ChatBody) -> int:
    """How many fields of the body nobody knows."""
    return sum(name not in _NOT_SERVED for name in body.model_extra or ())


# Where pydantic's words are about our classes, or about one half of what a field takes.
_OBJECT_FIELDS: Final = {
    "thinking": f'an object whose "type" is {SWITCHES_TAKEN}',
    "stream_options": 'an object such as {"include_usage": true}',
    "chat_template_kwargs": "an object",
}
_TAKEN: Final = {"reasoning_effort": EFFORTS_TAKEN, "type": SWITCHES_TAKEN}


def _first_problem(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    # Of a union's complaints, the one whose type did fit says what is wrong
    problem = next((p for p in problems if not p["type"].endswith("_type")), problems[0])
    names = [str(part) for part in problem["loc"]]
    field = names[0] if names else None
    if field in _OBJECT_FIELDS:
        return InvalidRequest(_in_object(field, names[1:], problem["msg"]), param=field)
    if field in _TAKEN:
        return InvalidRequest(f"{field} must be {_TAKEN[field]}", param=field)
    # Deeper parts of the place are pydantic's names of union members; the field and an index say enough
    place = "".join([names[0], *(f"[{name}]" for name in names[1:] if name.isdigit())]) if names else "body"
    return InvalidRequest(f"Invalid '{place}': {problem['msg']}", param=field)


def _in_object(field: str, inner: list[str], said: str) -> str:
    if not inner:
        return f"{field} must be {_OBJECT_FIELDS[field]}"
    if taken := _TAKEN.get(inner[0]):
        return f"{field}.{inner[0]} must be {taken}"
    return f"Invalid '{field}.{inner[0]}': {said}"
