"""The system block of a conversation, ids and all, as the official encoder renders it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import deepseek_recipe as recipe
from epdserve.model.demo.training.vocabulary import Strip, Vocabulary

_NAMES: Final = {50: "low", 75: "high", 100: "max"}  # efforts that the encoder renders itself
_SPLICED: Final = 75
_KEPT: Final = 4096


_GENERAL: Final = "\n\n## Tools"  # what follows is said of all tools
_DECLARED: Final = "### Available"  # what follows are the tools themselves


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where ``part`` begins in ``ids``."""
    return next(at for at in range(len(ids)) if tuple(ids[at : at + len(part)]) == tuple(part))


class Openings:
    """Everything before the first user marker, for a choice of effort, system text, tools and answer format."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        tokenizer = recipe.Tokenizer.from_str(vocabulary.definition)
        self._encoding = recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)
        self._options = recipe.ConversionOptions()
        self._render = lru_cache(_KEPT)(self._rendered)

    def strip(
        self,
        *,
        effort: int | None = None,
        system: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        schema: dict[str, Any] | None = None,
        brief: bool = False,
    ) -> Strip:
        """Ids from the start marker on, none of them learnt.

        Args:
            brief: Leave out what is the same for all tools, so that a short sequence has room for calls.
        """
        strip = Strip()
        ids = self._render(effort, system, json.dumps(list(tools)), json.dumps(schema))
        if brief:
            start, end = (_find(ids, self._vocabulary.encode(part)) for part in (_GENERAL, _DECLARED))
            ids = ids[:start] + ids[end:]
        strip.add(ids)
        return strip

    def _rendered(self, effort: int | None, system: str | None, tools: str, schema: str) -> tuple[int, ...]:
        body: dict[str, Any] = {
            "model": "DeepSeek-V4.1-Flash",
            "messages": [{"role": "user", "content": "x"}],
            "thinking": {"type": "disabled" if effort is None else "enabled"},
        }
        if effort is not None:
            body["reasoning_effort"] = _NAMES.get(effort, _NAMES[_SPLICED])
        if system is not None:
            body["messages"].insert(0, {"role": "system", "content": system})
        if tools != "[]":
            body["tools"] = [{"type": "function", "function": tool} for tool in json.loads(tools)]
        conversation = (
            recipe.ChatCompletionRequest(json.dumps(body).encode()).convert(self._options).conversation
        )
        if schema != "null":
            conversation = recipe.Conversation(
                conversation.messages,
                thinking_mode=conversation.thinking_mode,
                tools=conversation.tools,
                reasoning_effort=conversation.reasoning_effort,
                response_schema=json.loads(schema),
            )
        ids = self._encoding.encode(conversation)
        ids = ids[: ids.index(self._vocabulary.user)]
        if effort is not None and effort not in _NAMES:
            number = list(self._vocabulary.encode(str(_SPLICED)))
            at = next(i for i in range(len(ids)) if ids[i : i + len(number)] == number)
            ids[at : at + len(number)] = self._vocabulary.encode(str(effort))
        return tuple(ids)
