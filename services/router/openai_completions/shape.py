"""The bytes of raw completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from epdserve.services.errors import ServiceError
from epdserve.services.router.events import Delta, Ending, Message
from epdserve.services.router.http_errors import error_body
from epdserve.services.router.prompt_logprobs import PromptTold
from epdserve.services.router.usage import Totals, Usage
from epdserve.services.router.vocabulary import finite
from epdserve.services.types import PrefillResult

DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionHead:
    """What an answer begins with, and what of it was asked for.

    Attributes:
        echoes: Text of each prompt to repeat; empty = no echo.
        n: Choices a prompt.
        told: Log-probabilities are part of the answer.
        usage_last: Usage comes in the last chunk and unasked, as DeepSeek's service has it.
    """

    answer_id: str
    model: str
    created: int
    n: int
    echoes: Sequence[str] = ()
    told: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    usage_last: bool = False

    def fields(self) -> dict[str, Any]:
        """The leading fields."""
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


class CompletionShape:
    """Implements ``Shape``."""

    def __init__(
        self, head: CompletionHead, prompts: PromptTold | None, prompt_names: Sequence[list[str]]
    ) -> None:
        self._head = head
        self._prompts = prompts
        self._prompt_names = prompt_names
        self._offsets: dict[int, int] = {}
        self._lead = b"data: " + orjson.dumps(head.fields())[:-1] + b',"choices":['
        self._no_usage = b',"usage":null}\n\n' if head.include_usage or head.usage_last else b"}\n\n"

    def first(self, so_far: Callable[[], Usage]) -> bytes:
        """The echo of each choice's prompt, if wanted."""
        if not self._head.echoes:
            return b""
        choices = range(len(self._head.echoes) * self._head.n)
        return b"".join(self._chunk(choice, *self._echo(choice), None, so_far) for choice in choices)

    def deltas(self, choice: int, deltas: Sequence[Delta], so_far: Callable[[], Usage]) -> bytes:
        """One event a piece of text."""
        return b"".join(
            self._chunk(choice, delta.text, self._logprobs(choice, delta.text, delta.logprobs), None, so_far)
            for delta in deltas
        )

    def ended(self, choice: int, ending: Ending, totals: Totals | None) -> bytes:
        """The finish reason; with the last choice usage and the end of the stream."""
        head = b"%b%b]" % (self._lead, orjson.dumps(self._choice(choice, "", None, ending)))
        if totals is None:
            return head + self._no_usage
        usage = b',"usage":' + orjson.dumps(totals.usage.as_fields())
        extra = b"" if totals.receipt is None else b',"epdserve":' + orjson.dumps(totals.receipt)
        if self._head.usage_last:
            return b"".join((head, usage, extra, b"}\n\n", DONE))
        if not self._head.include_usage:
            return b"".join((head, extra, self._no_usage, DONE))
        return b"".join((head, self._no_usage, self._lead, b"]", usage, extra, b"}\n\n", DONE))

    def failed(self, error: ServiceError) -> bytes:
        """One error event and the end of the stream."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def whole(self, messages: Sequence[Message], totals: Totals) -> bytes:
        """The JSON answer."""
        choices = []
        for index, message in enumerate(messages):
            text, told = self._echo(index) if self._head.echoes else ("", None)
            more = self._logprobs(index, message.content, message.content_logprobs or None)
            choice = self._choice(index, text + message.content, _joined(told, more), message.ending)
            if self._prompts is not None and not self._head.told:
                choice["prompt_logprobs"] = self._prompts.of(index // self._head.n)
            choices.append(choice)
        fields = {**self._head.fields(), "choices": choices, "usage": totals.usage.as_fields()}
        if totals.receipt is not None:
            fields["epdserve"] = totals.receipt
        return orjson.dumps(fields)

    def prefilled(self, prompt: int, result: PrefillResult) -> None:
        """Take the prompt's log-probabilities."""
        if self._prompts is not None:
            self._prompts.take(prompt, result.prompt_logprobs)

    def _choice(
        self, index: int, text: str, told: Mapping[str, Any] | None, ending: Ending | None
    ) -> dict[str, Any]:
        reason = None if ending is None else ending.reason
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}

    def _chunk(
        self,
        choice: int,
        text: str,
        told: Mapping[str, Any] | None,
        ending: Ending | None,
        so_far: Callable[[], Usage],
    ) -> bytes:
        tail = self._no_usage
        if self._head.continuous_usage:
            tail = b',"usage":' + orjson.dumps(so_far().as_fields()) + b"}\n\n"
        return b"".join((self._lead, orjson.dumps(self._choice(choice, text, told, ending)), b"]", tail))

    def _echo(self, choice: int) -> tuple[str, dict[str, Any] | None]:
        """The prompt's text, and what is told of its tokens."""
        prompt = choice // self._head.n
        text = self._head.echoes[prompt]
        self._offsets[choice] = len(text)
        raw = None if self._prompts is None or not self._head.told else self._prompts.raw(prompt)
        entries = None if self._prompts is None else self._prompts.of(prompt)
        if raw is None or entries is None:
            return text, None
        names = self._prompt_names[prompt]
        offsets, at = [], 0
        for name in names:
            offsets.append(at)
            at += len(name)
        top = [
            None if entry is None else {one["decoded_token"]: one["logprob"] for one in entry.values()}
            for entry in entries
        ]
        logprobs: list[float | None] = [None, *map(finite, raw.logprobs.tolist())]
        return text, {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _logprobs(
        self, choice: int, text: str, entries: Sequence[Mapping[str, Any]] | None
    ) -> dict[str, Any] | None:
        """The legacy object: parallel lists."""
        at = self._offsets.get(choice, 0)
        self._offsets[choice] = at + len(text)
        if not entries or not self._head.told:
            return None
        offsets = []
        for entry in entries:
            offsets.append(at)
            at += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in entries
            ],
            "text_offset": offsets,
        }


def _joined(left: dict[str, Any] | None, right: dict[str, Any] | None) -> dict[str, Any] | None:
    if left is None or right is None:
        return right if left is None else left
    return {name: [*left[name], *right[name]] for name in left}
