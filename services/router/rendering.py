"""A chat becomes token ids: conversion, rendering and encoding by the recipe, its faults corrected here.

Corrections (spec 5.3, 6.2), each with a test that names it:
  developer role          the recipe refuses it; rendered as system
  ``reasoning`` in history  the recipe reads ``reasoning_content`` only; either name is taken
  numeric efforts         the recipe refuses them; the number is spliced into the ids of the effort line

Text of users, tools and schemas never becomes a marker: the recipe encodes it without the added vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import deepseek_recipe as recipe
import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.http_errors import ContextTooLong
from epdserve.services.router.recipe_faults import REFUSALS, Items, located
from epdserve.services.router.tokenizer import RouterTokenizer
from epdserve.services.types import Effort, TokenIds, token_ids

# The recipe resolves the prompt layout from a model name of its own; ours has been checked before.
_RECIPE_MODEL: Final = "DeepSeek-V4.1-Flash"
_NAMES: Final = {50: "low", 75: "high", 100: "max"}
_SPLICED: Final = 75


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A prompt, and what the parser of its answer must know.

    Attributes:
        effort: None if the request does not think.
        conversion: The recipe's request; its chunk generator wants it.
    """

    tokens: TokenIds
    effort: Effort | None
    conversion: recipe.ConversationRequest


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The parts of a chat request that shape its prompt or the parsing of its answer."""

    messages: Sequence[dict[str, Any]]
    effort: Effort | None
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str | None = None
    response_format: dict[str, Any] | None = None
    stop: Sequence[str] = ()


class ChatRenderer:
    """Renders chats for one tokenizer. Thread-safe; encoding releases Python's lock."""

    def __init__(self, tokenizer: RouterTokenizer) -> None:
        """Prepare the encoder.

        Raises:
            ValueError: The effort line of this tokenizer is not what the splice expects.
        """
        self._tokenizer = tokenizer
        self._encoding = tokenizer.encoding
        self._options = recipe.ConversionOptions()
        self._splice_at, self._spliced_ids = self._find_effort_number()

    def render(self, prompt: ChatPrompt, *, max_tokens: int) -> RenderedChat:
        """Token ids of a chat, generation header included.

        Text that cannot fit ``max_tokens`` however it is cut is refused before it is encoded: encoding takes some 250
        times its bytes in memory.

        Raises:
            ContextTooLong: The prompt has more than ``max_tokens`` tokens for certain.
            InvalidRequest: The recipe refuses the messages, the tools or what they are combined with.
        """
        conversion = self._convert(prompt)
        conversation = conversion.conversation
        if any(message.image_sources for message in conversation.messages):
            raise InvalidRequest(
                "this deployment serves text only: image parts are refused", param="messages"
            )
        text_bytes = len(self._encoding.render_conversation(conversation).prompt.encode())
        if (least := text_bytes // self._tokenizer.longest_token_bytes) > max_tokens:
            raise ContextTooLong(
                f"the context holds {max_tokens} tokens: the messages have at least {least}", param="messages"
            )
        ids = self._encoding.encode(conversation)
        if prompt.effort is not None and prompt.effort.level not in _NAMES:
            start = self._splice_at
            ids[start : start + len(self._spliced_ids)] = self._tokenizer.number_ids(prompt.effort.level)
        return RenderedChat(token_ids(ids), prompt.effort, conversion)

    def _convert(self, prompt: ChatPrompt) -> recipe.ConversationRequest:
        frame: dict[str, Any] = {
            "model": _RECIPE_MODEL,
            "thinking": {"type": "disabled" if prompt.effort is None else "enabled"},
        }
        if prompt.effort is not None:
            frame["reasoning_effort"] = _NAMES.get(prompt.effort.level, _NAMES[_SPLICED])
        if prompt.tool_choice is not None:
            frame["tool_choice"] = prompt.tool_choice
        if prompt.response_format is not None:
            frame["response_format"] = prompt.response_format
        if prompt.stop:
            frame["stop"] = list(prompt.stop)

        def convert(messages: Items, tools: Items) -> recipe.ConversationRequest:
            body = {**frame, "messages": [_corrected(message) for message in messages]}
            if tools:
                body["tools"] = list(tools)
            return recipe.ChatCompletionRequest(orjson.dumps(body)).convert(self._options)

        try:
            return convert(prompt.messages, prompt.tools)
        except REFUSALS as error:
            raise located(error, convert, prompt.messages, prompt.tools) from error

    def _find_effort_number(self) -> tuple[int, list[int]]:
        """Where the number of the effort line stands, and the ids of the number to replace.

        Proven on the three levels that the recipe renders itself, so that a splice is what it would render.
        """
        hello = ({"role": "user", "content": "x"},)
        ids = {
            level: self._encoding.encode(self._convert(ChatPrompt(hello, Effort(level))).conversation)
            for level in _NAMES
        }
        numbers = {level: self._tokenizer.number_ids(level) for level in _NAMES}
        start = next(i for i, column in enumerate(zip(*ids.values(), strict=False)) if len(set(column)) > 1)
        heads = {tuple(row[:start]) for row in ids.values()}
        tails = {tuple(row[start + len(numbers[level]) :]) for level, row in ids.items()}
        exact = all(row[start : start + len(numbers[level])] == numbers[level] for level, row in ids.items())
        if not exact or len(heads) != 1 or len(tails) != 1:
            raise ValueError("the effort line does not encode its number apart from its neighbours")
        return start, numbers[_SPLICED]


def _corrected(message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role == "developer":
        return {**message, "role": "system"}
    if (
        role == "assistant"
        and message.get("reasoning_content") is None
        and message.get("reasoning") is not None
    ):
        return {**message, "reasoning_content": message["reasoning"]}
    return message
