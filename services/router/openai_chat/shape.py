"""The bytes of chat answers: OpenAI's shape under ``/v1``, DeepSeek's own under the paths without it.

They differ (spec 6.3): DeepSeek puts usage into the last chunk whether asked or not, keeps a null key for the other
text field, and writes ``""`` where OpenAI writes null beside tool calls. Both carry ``reasoning_content``; ours
carries ``reasoning`` as well, the name that vLLM's clients read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import orjson
from epdserve.services.errors import ServiceError
from epdserve.services.router.events import Call, Delta, Ending, Kind, Message
from epdserve.services.router.http_errors import error_body
from epdserve.services.router.prompt_logprobs import PromptTold
from epdserve.services.router.usage import Totals, Usage
from epdserve.services.types import PrefillResult

DONE: Final = b"data: [DONE]\n\n"
# Deltas of OpenAI's shape around their text, which the reasoning has under two names
_PLAIN: Final = {
    Kind.CONTENT: (b'{"content":', b"", b"}"),
    Kind.REASONING: (b'{"content":null,"reasoning_content":', b',"reasoning":', b"}"),
}
_PLAIN_END: Final = b',"logprobs":null,"finish_reason":null}]'


class Dialect(Enum):
    """Whose shape an answer has."""

    OPENAI = "openai"
    DEEPSEEK = "deepseek"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHead:
    """What a chat answer begins with, and what of it was asked for.

    Attributes:
        continuous_usage: Every chunk carries the counts so far.
    """

    answer_id: str
    model: str
    created: int
    choices: int
    thinking: bool
    include_usage: bool = False
    continuous_usage: bool = False
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


class ChatShape:
    """Implements ``Shape``. The parts of a stream that never change are encoded once."""

    def __init__(self, head: ChatHead, dialect: Dialect, told: PromptTold | None = None) -> None:
        self._head = head
        self._dialect = dialect
        self._deepseek = dialect is Dialect.DEEPSEEK
        self._told = told
        self._lead = b"data: " + orjson.dumps(head.fields("chat.completion.chunk"))[:-1] + b',"choices":['
        self._leads = [self._lead + b'{"index":%d,"delta":' % index for index in range(head.choices)]
        # Whoever asks for usage is promised a null in every chunk before it; DeepSeek's shape always has the key
        null_usage = head.include_usage or self._deepseek
        self._no_usage = b',"usage":null}\n\n' if null_usage else b"}\n\n"

    def first(self, so_far: Callable[[], Usage]) -> bytes:
        """The chunks that name the role."""
        if self._head.thinking:
            delta = {"role": "assistant", "content": None, **self._reasoning("")}
        else:
            delta = {"role": "assistant", "content": ""}
        tail = self._tail(so_far)
        if self._told is not None and (entries := self._told.of(0)) is not None:
            tail = b',"prompt_logprobs":' + orjson.dumps(entries) + tail
        return b"".join(self._chunk(index, delta, None, tail) for index in range(self._head.choices))

    def deltas(self, choice: int, deltas: Sequence[Delta], so_far: Callable[[], Usage]) -> bytes:
        """One event a delta, in one piece."""
        tail = self._tail(so_far)
        if self._are_plain(deltas):
            return self._plain_events(choice, deltas, tail)
        return b"".join([self._chunk(choice, self._delta(delta), delta, tail) for delta in deltas])

    def ended(self, choice: int, ending: Ending, totals: Totals | None) -> bytes:
        """The finish reason; with the last one usage where this dialect puts it, and the end of the stream."""
        delta: dict[str, Any] = {}
        if self._deepseek:
            delta = {"content": "", **({"reasoning_content": None} if self._head.thinking else {})}
        head = b'%b%b,"logprobs":null,"finish_reason":%b}]' % (
            self._leads[choice],
            orjson.dumps(delta),
            orjson.dumps(ending.reason),
        )
        if totals is None:
            return head + self._no_usage
        usage = orjson.dumps(totals.usage.as_fields())
        extra = b"" if totals.receipt is None else b',"epdserve":' + orjson.dumps(totals.receipt)
        if self._deepseek:
            return b"".join((head, b',"usage":', usage, extra, b"}\n\n", DONE))
        if not self._head.include_usage:
            return b"".join((head, extra, self._no_usage, DONE))
        last = (self._lead, b'],"usage":', usage, extra, b"}\n\n")
        return b"".join((head, self._no_usage, *last, DONE))

    def failed(self, error: ServiceError) -> bytes:
        """One error event and the end of the stream."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def whole(self, messages: Sequence[Message], totals: Totals) -> bytes:
        """The JSON answer."""
        choices = [
            {
                "index": index,
                "message": self._message(message),
                "logprobs": self._logprobs(message.reasoning_logprobs, message.content_logprobs),
                "finish_reason": message.ending.reason,
            }
            for index, message in enumerate(messages)
        ]
        fields = {
            **self._head.fields("chat.completion"),
            "choices": choices,
            "usage": totals.usage.as_fields(),
        }
        if self._told is not None:
            fields["prompt_logprobs"] = self._told.of(0)
        if totals.receipt is not None:
            fields["epdserve"] = totals.receipt
        return orjson.dumps(fields)

    def prefilled(self, prompt: int, result: PrefillResult) -> None:
        """Take the prompt's log-probabilities."""
        if self._told is not None:
            self._told.take(prompt, result.prompt_logprobs)

    def _tail(self, so_far: Callable[[], Usage]) -> bytes:
        if not self._head.continuous_usage:
            return self._no_usage
        return b',"usage":' + orjson.dumps(so_far().as_fields()) + b"}\n\n"

    def _are_plain(self, deltas: Sequence[Delta]) -> bool:
        """Whether these are pieces of one text and nothing else, as most are."""
        kind = deltas[0].kind
        return (
            not self._deepseek
            and kind in _PLAIN
            and all(delta.kind is kind and delta.logprobs is None for delta in deltas)
        )

    def _plain_events(self, choice: int, deltas: Sequence[Delta], tail: bytes) -> bytes:
        """An event of each: what does not change between them is put together once."""
        before, between, after = _PLAIN[deltas[0].kind]
        head = self._leads[choice] + before
        end = after + _PLAIN_END + tail
        texts = [orjson.dumps(delta.text) for delta in deltas]
        if between:
            texts = [text + between + text for text in texts]
        return head + (end + head).join(texts) + end

    def _chunk(self, choice: int, fields: dict[str, Any], delta: Delta | None, tail: bytes) -> bytes:
        told = b"null"
        if delta is not None and delta.logprobs is not None:
            reasoning = delta.kind is Kind.REASONING
            told = orjson.dumps(
                self._logprobs(*([delta.logprobs, []] if reasoning else [[], delta.logprobs]))
            )
        lead = self._leads[choice]
        return b"".join((lead, orjson.dumps(fields), b',"logprobs":', told, b',"finish_reason":null}]', tail))

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if delta.kind is Kind.REASONING:
            return {"content": None, **self._reasoning(delta.text)}
        if delta.kind is Kind.CONTENT:
            if self._deepseek and self._head.thinking:
                return {"content": delta.text, "reasoning_content": None}
            return {"content": delta.text}
        call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.text}}
        if delta.kind is Kind.CALL:
            call = {"index": delta.index, "id": delta.call_id, "type": "function"}
            call["function"] = {"name": delta.text, "arguments": ""}
        return {"tool_calls": [call]}

    def _reasoning(self, text: str) -> dict[str, str]:
        if self._deepseek:
            return {"reasoning_content": text}
        return {"reasoning_content": text, "reasoning": text}

    def _logprobs(
        self, reasoning: list[dict[str, Any]], content: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Those of the content, and apart from them those of the reasoning."""
        if not reasoning and not content:
            return None
        fields: dict[str, Any] = {} if self._deepseek else {"content": None, "refusal": None}
        if content:
            fields["content"] = content
        if reasoning:
            fields["reasoning_content"] = reasoning
        return fields

    def _message(self, message: Message) -> dict[str, Any]:
        content: str | None = message.content
        if not content and message.calls and not self._deepseek:
            content = None
        fields: dict[str, Any] = {"role": "assistant", "content": content}
        if self._head.thinking:
            fields |= self._reasoning(message.reasoning)
        if message.calls:
            fields["tool_calls"] = [self._call(index, call) for index, call in sorted(message.calls.items())]
        return fields

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": "".join(call.arguments)}
        fields = {"id": call.call_id, "type": "function", "function": function}
        return {"index": index, **fields} if self._deepseek else fields
