"""Tools in ``epdserve chat``: declared from a file, calls put together from a stream and shown, results typed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from epdserve.services.cli.errors import CommandError


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Tools to declare: a JSON list of functions, each bare or as the chat API has them.

    Raises:
        CommandError: It cannot be read, or is something else.
    """
    try:
        listed = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read tools from {path}: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise CommandError(f"{path} must hold a JSON list of functions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed]


class Calls:
    """The calls of one answer, as their pieces arrive."""

    def __init__(self) -> None:
        self._by_index: dict[int, dict[str, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_index)

    def take(self, piece: dict[str, Any]) -> None:
        """A piece of a call: its id and name come once, its arguments bit by bit."""
        call = self._by_index.setdefault(
            piece.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        call["id"] = piece.get("id") or call["id"]
        said = piece.get("function") or {}
        call["function"]["name"] = said.get("name") or call["function"]["name"]
        call["function"]["arguments"] += said.get("arguments") or ""

    def listed(self) -> list[dict[str, Any]]:
        """The calls, as the message that made them has them."""
        return [self._by_index[index] for index in sorted(self._by_index)]

    def lines(self) -> list[str]:
        """Each as ``name(field=value, ...)``; arguments that are no JSON object as they came."""
        return [_shown(call["function"]["name"], call["function"]["arguments"]) for call in self.listed()]


def _shown(name: str, arguments: str) -> str:
    try:
        fields = json.loads(arguments)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return f"{name}({arguments})"
    return f"{name}({', '.join(f'{field}={json.dumps(value)}' for field, value in fields.items())})"
