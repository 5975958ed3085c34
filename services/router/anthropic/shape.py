"""The bytes of Messages answers: events by name, content in blocks, errors in Anthropic's own body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from epdserve.services.errors import ServiceError
from epdserve.services.router.events import Call, Delta, Ending, Kind, Message
from epdserve.services.router.http_errors import ErrorStyle, names_of
from epdserve.services.router.usage import Totals, Usage
from epdserve.services.types import PrefillResult

_STOPS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCKS: Final[dict[Kind, dict[str, Any]]] = {
    Kind.REASONING: {"type": "thinking", "thinking": "", "signature": ""},
    Kind.CONTENT: {"type": "text", "text": ""},
}
_DELTAS: Final = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CONTENT: ("text_delta", "text"),
    Kind.ARGUMENTS: ("input_json_delta", "partial_json"),
}


class AnthropicErrors(ErrorStyle):
    """``{"type": "error", "error": {type, message}, "request_id"}``."""

    def body(self, error: ServiceError, request_id: str) -> bytes:
        """The body of an answer."""
        inner = {"type": names_of(error).anthropic, "message": error.message}
        return orjson.dumps({"type": "error", "error": inner, "request_id": request_id})

    def event(self, error: ServiceError, request_id: str) -> bytes:
        """The end of a stream that has begun; this protocol has no ``[DONE]``."""
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"


@dataclass(frozen=True, slots=True)
class MessageHead:
    """What a message begins with."""

    message_id: str
    request_id: str
    model: str
    thinking: bool


class MessagesShape:
    """Implements ``Shape``; one choice only. The recipe's own writer is the oracle of a test."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head
        self._errors = AnthropicErrors()
        self._open: Kind | None = None
        self._blocks = 0
        self._pinged = False

    def first(self, so_far: Callable[[], Usage]) -> bytes:
        """``message_start``; a message that thinks opens its block at once, as the official service does."""
        message = {**self._message([], None), "usage": usage_fields(so_far(), output_tokens=0)}
        start = _event("message_start", {"message": message})
        return start + self._begin(Kind.REASONING) if self._head.thinking else start

    def deltas(self, choice: int, deltas: Sequence[Delta], so_far: Callable[[], Usage]) -> bytes:
        """Blocks and their pieces."""
        events = []
        for delta in deltas:
            if delta.kind is Kind.CALL:
                block = {"type": "tool_use", "id": delta.call_id, "name": delta.text, "input": {}}
                events += [self._end_block(), self._begin(Kind.ARGUMENTS, block)]
                continue
            if self._open is not delta.kind:
                events += [self._end_block(), self._begin(delta.kind)]
            kind, field = _DELTAS[delta.kind]
            events.append(self._piece({"type": kind, field: delta.text}))
        return b"".join(events)

    def ended(self, choice: int, ending: Ending, totals: Totals | None) -> bytes:
        """``message_delta`` with the reason and usage, and ``message_stop``."""
        assert totals is not None
        fields: dict[str, Any] = {"delta": _stop_fields(ending), "usage": usage_fields(totals.usage)}
        if totals.receipt is not None:
            fields["epdserve"] = totals.receipt
        return b"".join((self._end_block(), _event("message_delta", fields), _event("message_stop", {})))

    def failed(self, error: ServiceError) -> bytes:
        """An ``error`` event, and the end."""
        return self._errors.event(error, self._head.request_id)

    def whole(self, messages: Sequence[Message], totals: Totals) -> bytes:
        """The JSON answer."""
        message = messages[0]
        blocks: list[dict[str, Any]] = []
        if self._head.thinking:
            blocks.append(
                {"type": "thinking", "thinking": message.reasoning, "signature": self._head.message_id}
            )
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        blocks += [_tool_use(call) for _, call in sorted(message.calls.items())]
        fields = {**self._message(blocks, message.ending), "usage": usage_fields(totals.usage)}
        if totals.receipt is not None:
            fields["epdserve"] = totals.receipt
        return orjson.dumps(fields)

    def prefilled(self, prompt: int, result: PrefillResult) -> None:
        """Nothing of a prefill is shown."""

    def _message(self, blocks: list[dict[str, Any]], ending: Ending | None) -> dict[str, Any]:
        return {
            "id": self._head.message_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": blocks,
            **_stop_fields(ending),
        }

    def _begin(self, kind: Kind, block: dict[str, Any] | None = None) -> bytes:
        self._open = kind
        start = _event(
            "content_block_start", {"index": self._blocks, "content_block": block or _BLOCKS[kind]}
        )
        if self._pinged:
            return start
        self._pinged = True
        return start + _event("ping", {})

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open is Kind.REASONING:
            signature = self._piece({"type": "signature_delta", "signature": self._head.message_id})
        end = _event("content_block_stop", {"index": self._blocks})
        self._open = None
        self._blocks += 1
        return signature + end

    def _piece(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks, "delta": delta})


def usage_fields(usage: Usage, *, output_tokens: int | None = None) -> dict[str, Any]:
    """``usage`` of a message: ``input_tokens`` are those that no cache held."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens if output_tokens is None else output_tokens,
        "service_tier": "standard",
    }


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **fields}))


def _stop_fields(ending: Ending | None) -> dict[str, str | None]:
    if ending is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = _STOPS[ending.reason] if ending.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": ending.stop_sequence}


def _tool_use(call: Call) -> dict[str, Any]:
    text = "".join(call.arguments)
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError:
        given = None
    if not isinstance(given, dict):
        # This protocol has room for objects only: what the model wrote instead is not lost
        given = {"arguments": text}
    return {"type": "tool_use", "id": call.call_id, "name": call.name, "input": given}
