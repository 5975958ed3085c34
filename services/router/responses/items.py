"""Output items of a response while they are written: what each kind's events and final object look like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

# What may still change the meaning of the text before it: a lone backslash, a \u that is not complete, half a pair
_UNFINISHED: Final = re.compile(
    r"(?:(?<!\\)(?:\\\\)*)(\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)$"
)
_CUSTOM_LEAD: Final = '{"input": "'


@dataclass(slots=True)
class Item:
    """An item and the text it has so far.

    Attributes:
        kind: ``reasoning``, ``message``, ``function_call`` or ``custom_tool_call``.
        text: Reasoning, content, arguments or input.
        name, namespace, call_id: Of a call.
    """

    kind: str
    item_id: str
    index: int
    text: str = ""
    name: str = ""
    namespace: str | None = None
    call_id: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    raw: str = ""

    def part(self, *, final: bool = True) -> dict[str, Any]:
        """The one content part of reasoning or a message."""
        text = self.text if final else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = self.logprobs if final else []
        return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}

    def fields(self, status: str, *, response_id: str, last: bool = True) -> dict[str, Any]:
        """The item as an object; ``last`` if nothing but calls may follow it."""
        begun = status == "in_progress"
        head: dict[str, Any] = {"type": self.kind, "id": self.item_id, "status": status}
        if self.kind == "reasoning":
            content = [] if begun else [self.part()]
            return {
                **head,
                "content": content,
                "summary": [],
                "encrypted_content": f"{response_id}-{self.index}",
            }
        if self.kind == "message":
            phase = "final_answer" if last else "commentary"
            return {**head, "role": "assistant", "phase": phase, "content": [] if begun else [self.part()]}
        head |= {"call_id": self.call_id, "name": self.name}
        if self.namespace is not None:
            head["namespace"] = self.namespace
        return {**head, ("input" if self.kind == "custom_tool_call" else "arguments"): self.text}

    def grow(self, text: str, logprobs: Sequence[dict[str, Any]]) -> str:
        """Take a piece; what of it is new text of the item."""
        if self.kind != "custom_tool_call":
            self.text += text
            self.logprobs += logprobs
            return text
        self.raw += text
        whole = custom_input(self.raw)
        new, self.text = whole[len(self.text) :], whole
        return new


def custom_input(arguments: str) -> str:
    """The text inside ``{"input": "..."}``, as far as it has come and cannot change any more."""
    if not arguments.startswith(_CUSTOM_LEAD):
        return ""
    inner = arguments[len(_CUSTOM_LEAD) :]
    if inner.endswith('"}') and _json('"' + inner[:-1]) is not None:
        inner = inner[:-2]
    elif inner.endswith('"') and _json('"' + inner) is not None:
        inner = inner[:-1]
    found = _UNFINISHED.search(inner)
    if found is not None:
        inner = inner[: found.start(1)]
    text = _json('"' + inner + '"')
    return text if isinstance(text, str) else ""


def _json(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
