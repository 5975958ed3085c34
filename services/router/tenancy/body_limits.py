"""How much one body may hold of what its bytes say little about: messages, parts, tools, stop strings, depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epdserve.services.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds of one body; 0 = none but the body's bytes.

    Attributes:
        messages: Messages of a conversation, or items of an input.
        parts: Parts of one message.
        tools: Declared tools.
        stops: Stop strings.
        depth: Objects and lists inside one another.
    """

    messages: int = 10_000
    parts: int = 1_000
    tools: int = 1_024
    stops: int = 16
    depth: int = 200

    def check(self, body: object, *, may_be_deep: bool = True) -> None:
        """Refuse a body that is over a limit.

        Args:
            may_be_deep: False if the caller knows better; depth is not looked for then.

        Raises:
            InvalidRequest: ``param`` names the field.
        """
        if not isinstance(body, dict):
            return
        for name in ("messages", "input"):
            self._check_messages(name, body.get(name))
        _at_most(self.tools, body.get("tools"), "tools")
        for name in ("stop", "stop_sequences"):
            _at_most(self.stops, body.get(name), name)
        if self.depth and may_be_deep:
            for name, value in body.items():
                self._check_depth(str(name), value)

    def _check_depth(self, name: str, value: object) -> None:
        entries = (
            [(f"{name}[{n}]", entry) for n, entry in enumerate(value)] if isinstance(value, list) else []
        )
        for place, entry in entries or [(name, value)]:
            if _deeper_than(entry, self.depth):
                raise InvalidRequest(f"{place}: nested too deeply", param=place)

    def _check_messages(self, name: str, messages: object) -> None:
        _at_most(self.messages, messages, name)
        if not self.parts or not isinstance(messages, list):
            return
        for message in messages:
            if isinstance(message, dict):
                _at_most(self.parts, message.get("content"), f"{name}.content")


def _at_most(most: int, value: object, name: str) -> None:
    if most and isinstance(value, list) and len(value) > most:
        raise InvalidRequest(f"{name} holds {len(value)} entries; at most {most} are taken", param=name)


def _deeper_than(value: Any, most: int) -> bool:
    level = [value] if isinstance(value, (Mapping, list)) else []
    for _ in range(most):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, (Mapping, list))
        ]
    return bool(level)
