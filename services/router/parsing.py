"""Sampled ids become reasoning, content and tool calls: the recipe's stream processor, one instance a choice.

Markers are recognised by id, so the same characters typed by anyone are text. EOS never reaches the processor.
Ids go in one by one, so that nothing depends on how they were grouped on the way here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import deepseek_recipe as recipe
import orjson
from epdserve.services.router.rendering import RenderedChat
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.types import FinishReason

_REASONS: Final = {
    FinishReason.STOP: recipe.InferenceFinishReason.Stop,
    FinishReason.LENGTH: recipe.InferenceFinishReason.Length,
}


class Kind(Enum):
    """Which field of a message a delta belongs to."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"
    ARGUMENTS = "arguments"


@dataclass(slots=True)
class Delta:
    """A piece of the answer.

    Attributes:
        text: New text of the field; the function's name for CALL.
        index: Which tool call, for CALL and ARGUMENTS.
        call_id: For CALL.
    """

    kind: Kind
    text: str
    index: int = 0
    call_id: str = ""


class OutputParser:
    """Parses the output of one choice and counts its tokens. Not thread-safe.

    Attributes:
        completion_tokens: Sampled ids taken, EOS and markers included; ids after a stop string are not.
        reasoning_tokens: Sampled ids before the marker that ended the reasoning; None if the request does not
            think. The recipe's own count misses ids when the reasoning quotes a marker, so ours is used.
        finish_reason: None while the answer runs.
        answered: Whether there was any content or call.
    """

    def __init__(
        self, chat: RenderedChat, tokenizer: RouterTokenizer, stop_token_ids: Sequence[int] = ()
    ) -> None:
        generator = recipe.ChatCompletionRequest.chunk_generator(chat.conversion, "", "")
        options = chat.conversion.parsing_options
        self._processor = recipe.StreamProcessor(generator, options, tokenizer.native)
        self._processor.push(recipe.InferenceChunk.ready())
        stage = options.thinking_initial_stage
        self._in_reasoning = stage is not None and stage.starts_in_reasoning()
        self._eos_id = tokenizer.eos_id
        self._stop_ids = frozenset(stop_token_ids)
        self._think_end_id = tokenizer.think_end_id
        self._dsml_id = tokenizer.dsml_id if options.parse_tool_calls else -1
        self.completion_tokens = 0
        self.reasoning_tokens: int | None = None if stage is None else 0
        self.finish_reason: str | None = None
        self.answered = False

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: nothing pushed now would change it, so decoding may end."""
        return self.finish_reason is not None

    def push(self, ids: Iterable[int]) -> list[Delta]:
        """Deltas that these ids complete, adjacent ones of one field joined."""
        deltas: list[Delta] = []
        for token in ids:
            if self.finish_reason is not None:
                break
            self._count(token)
            if token == self._eos_id or token in self._stop_ids:
                continue
            for chunk in self._processor.push(recipe.InferenceChunk.tokens([token])):
                self._take(chunk.to_json(), deltas)
        return deltas

    def finish(self, reason: FinishReason) -> list[Delta]:
        """Deltas withheld so far; sets the finish reason if a stop string has not set it already."""
        deltas: list[Delta] = []
        if self.finish_reason is None:
            for chunk in self._processor.push(recipe.InferenceChunk.finish(_REASONS[reason])):
                self._take(chunk.to_json(), deltas)
        if self.finish_reason is None:
            raise AssertionError("the stream processor gave no finish reason")
        return deltas

    def _count(self, token: int) -> None:
        self.completion_tokens += 1
        if not self._in_reasoning:
            return
        if token in (self._think_end_id, self._eos_id):
            self._in_reasoning = False
        elif token == self._dsml_id:
            # The "<" before the marker is markup, not reasoning
            self._in_reasoning = False
            self.reasoning_tokens = max(0, (self.reasoning_tokens or 0) - 1)
        else:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + 1

    def _take(self, chunk_json: str, deltas: list[Delta]) -> None:
        choice = orjson.loads(chunk_json)["choices"][0]
        delta = choice["delta"]
        _append(delta, deltas)
        self.answered = self.answered or bool(delta.get("content") or delta.get("tool_calls"))
        if choice["finish_reason"] is not None:
            self.finish_reason = choice["finish_reason"]


def _append(delta: dict[str, Any], deltas: list[Delta]) -> None:
    if reasoning := delta.get("reasoning_content"):
        _join(Delta(Kind.REASONING, reasoning), deltas)
    if content := delta.get("content"):
        _join(Delta(Kind.CONTENT, content), deltas)
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        if "name" in function:
            # Never joined with its arguments: clients expect id and name first, arguments only afterwards
            deltas.append(Delta(Kind.CALL, function["name"], call["index"], call["id"]))
        if arguments := function.get("arguments"):
            _join(Delta(Kind.ARGUMENTS, arguments, call["index"]), deltas)


def _join(delta: Delta, deltas: list[Delta]) -> None:
    last = deltas[-1] if deltas else None
    if last is not None and last.kind is delta.kind and last.index == delta.index:
        last.text += delta.text
    else:
        deltas.append(delta)
