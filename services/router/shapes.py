"""The bytes of chat answers: OpenAI's shape under ``/v1``, DeepSeek's own under the paths without it.

They differ (spec 6.3): DeepSeek puts usage into the last chunk whether asked or not, keeps a null key for the other
text field, and writes ``""`` where OpenAI writes null beside tool calls. Both carry ``reasoning_content``; ours
carries ``reasoning`` as well, the name that vLLM's clients read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import orjson
from epdserve.services.router.parsing import Delta, Kind

DONE: Final = b"data: [DONE]\n\n"
# One newline and no empty line: some clients take an empty line as an empty event (spec case 41)
KEEP_ALIVE: Final = b": keep-alive\n"


class Dialect(Enum):
    """Whose shape an answer has."""

    OPENAI = "openai"
    DEEPSEEK = "deepseek"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every chunk and every answer of a request begins with."""

    answer_id: str
    model: str
    created: int
    fingerprint: str | None = None

    def fields(self, kind: str) -> dict[str, Any]:
        """The leading fields."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ChunkWriter:
    """Server-sent events of one streamed chat. The parts that never change are encoded once."""

    def __init__(self, head: AnswerHead, dialect: Dialect, *, thinking: bool, include_usage: bool) -> None:
        self._dialect = dialect
        self._thinking = thinking
        self._include_usage = include_usage
        self._head = b"data: " + orjson.dumps(head.fields("chat.completion.chunk"))[:-1] + b',"choices":['
        # Whoever asks for usage is promised a null in every chunk before it; DeepSeek's shape always has the key
        tail = b',"usage":null}\n\n' if include_usage or dialect is Dialect.DEEPSEEK else b"}\n\n"
        self._tail = b',"logprobs":null,"finish_reason":null}]' + tail
        self._last_tail = tail

    def first(self) -> bytes:
        """The chunk that names the role."""
        if not self._thinking:
            return self._chunk({"role": "assistant", "content": ""})
        return self._chunk({"role": "assistant", "content": None, **self._reasoning("")})

    def deltas(self, deltas: Iterable[Delta]) -> bytes:
        """One event a delta, in one piece."""
        return b"".join([self._chunk(self._delta(delta)) for delta in deltas])

    def last(self, finish_reason: str, usage: dict[str, Any], receipt: dict[str, Any] | None) -> bytes:
        """The finish reason, usage where this dialect puts it, and the end of the stream."""
        delta: dict[str, Any] = {}
        if self._dialect is Dialect.DEEPSEEK:
            delta = {"content": "", **({"reasoning_content": None} if self._thinking else {})}
        choice = b'{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]' % (
            orjson.dumps(delta),
            orjson.dumps(finish_reason),
        )
        extra = b"" if receipt is None else b',"epdserve":' + orjson.dumps(receipt)
        if self._dialect is Dialect.DEEPSEEK:
            return b"".join((self._head, choice, b',"usage":', orjson.dumps(usage), extra, b"}\n\n", DONE))
        if not self._include_usage:
            return b"".join((self._head, choice, extra, self._last_tail, DONE))
        last = (self._head, b'],"usage":', orjson.dumps(usage), extra, b"}\n\n")
        return b"".join((self._head, choice, self._last_tail, *last, DONE))

    def _chunk(self, delta: dict[str, Any]) -> bytes:
        return b"".join((self._head, b'{"index":0,"delta":', orjson.dumps(delta), self._tail))

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.kind is Kind.REASONING:
            return {"content": None, **self._reasoning(delta.text)}
        if delta.kind is Kind.CONTENT:
            if self._dialect is Dialect.DEEPSEEK and self._thinking:
                return {"content": delta.text, "reasoning_content": None}
            return {"content": delta.text}
        call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.text}}
        if delta.kind is Kind.CALL:
            call = {"index": delta.index, "id": delta.call_id, "type": "function"}
            call["function"] = {"name": delta.text, "arguments": ""}
        return {"tool_calls": [call]}

    def _reasoning(self, text: str) -> dict[str, str]:
        if self._dialect is Dialect.DEEPSEEK:
            return {"reasoning_content": text}
        return {"reasoning_content": text, "reasoning": text}


@dataclass(slots=True)
class _Call:
    call_id: str
    name: str
    arguments: list[str]


class AnswerWriter:
    """One whole chat answer, collected from deltas: the same text as the stream by construction."""

    def __init__(self, head: AnswerHead, dialect: Dialect, *, thinking: bool) -> None:
        self._head = head
        self._dialect = dialect
        self._thinking = thinking
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, _Call] = {}

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take deltas in order."""
        for delta in deltas:
            if delta.kind is Kind.REASONING:
                self._reasoning.append(delta.text)
            elif delta.kind is Kind.CONTENT:
                self._content.append(delta.text)
            elif delta.kind is Kind.CALL:
                self._calls[delta.index] = _Call(delta.call_id, delta.text, [])
            else:
                self._calls[delta.index].arguments.append(delta.text)

    def body(self, finish_reason: str, usage: dict[str, Any], receipt: dict[str, Any] | None) -> bytes:
        """The JSON answer."""
        choice = {"index": 0, "message": self._message(), "logprobs": None, "finish_reason": finish_reason}
        fields = {**self._head.fields("chat.completion"), "choices": [choice], "usage": usage}
        if receipt is not None:
            fields["epdserve"] = receipt
        return orjson.dumps(fields)

    def _message(self) -> dict[str, Any]:
        content: str | None = "".join(self._content)
        if not content and self._calls and self._dialect is Dialect.OPENAI:
            content = None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._thinking:
            message["reasoning_content"] = "".join(self._reasoning)
            if self._dialect is Dialect.OPENAI:
                message["reasoning"] = message["reasoning_content"]
        if self._calls:
            message["tool_calls"] = [self._call(index, call) for index, call in sorted(self._calls.items())]
        return message

    def _call(self, index: int, call: _Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": "".join(call.arguments)}
        fields = {"id": call.call_id, "type": "function", "function": function}
        return {"index": index, **fields} if self._dialect is Dialect.DEEPSEEK else fields


def error_event(body: bytes) -> bytes:
    """An error inside a stream that has begun, and the end of the stream."""
    return b"data: " + body + b"\n\n" + DONE
