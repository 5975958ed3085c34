"""What the recipe says about a chat it refuses, with its place, in the words of the API instead of its parser's.

The recipe names no place, or not always. Each message and each tool is therefore tried alone until one fails with the
same words: this costs another conversion of the body, for refused bodies only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import deepseek_recipe as recipe
import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.http_errors import quoted

Items = Sequence[dict[str, Any]]
Convert = Callable[[Items, Items], object]

# What the recipe raises on a chat: its own faults, serde's, and orjson's for what cannot be written (too deep).
REFUSALS: Final = (recipe.ConversionError, ValueError, TypeError)

_LONGEST_TEXT: Final = 400
# Trying one takes some 15 us under Python's lock, which streams wait for
_MOST_TRIED: Final = 4096
_HELLO: Final = ({"role": "user", "content": "x"},)

_NAMED_PLACE: Final = re.compile(r"Invalid '((?:messages|tools)\[\d+\])")
_POSITION: Final = re.compile(r" at line \d+ column \d+$")
# A good message gets these, too, if it stands alone
_ABOUT_NEIGHBOURS: Final = ("must be followed by tool messages", "must be a response to a preceding message")

_MISSING: Final = re.compile(r"missing field `(\w+)`")
_VARIANT: Final = re.compile(r"unknown variant `(.*)`, expected (?:one of )?(`.*`)", re.DOTALL)
_WRONG_TYPE: Final = re.compile(r"invalid type: (\w+).*, expected ([^\"`]+)", re.DOTALL)
_FOUND: Final = {
    "integer": "an integer",
    "floating": "a number",
    "boolean": "a boolean",
    "string": "a string",
    "map": "an object",
    "sequence": "an array",
    "null": "null",
    "unit": "null",
}
_WANTED: Final = {
    "a sequence": "an array",
    "a map": "an object",
    "variant identifier": "a string",
    "struct": "an object",
    "internally tagged enum": "an object",
}


def located(
    error: Exception, convert: Convert, messages: Items, tools: Items, *, messages_name: str = "messages"
) -> InvalidRequest:
    """The error of a client's request for what the recipe raised.

    Args:
        error: One of ``REFUSALS``, raised by ``convert(messages, tools)``.
        convert: Tries other messages and tools with everything else of the request as it was.
        messages_name: What the protocol calls its messages.

    Returns:
        With ``param`` = "messages[i]" or "tools[i]"; "messages" or "tools" if it is no single one's fault, or
        that of one beyond the first 4096; None if it is neither's.
    """
    said = _said(error)
    place = _place(said, convert, messages, tools)
    words = _in_plain_words(said)
    if place is not None and place.startswith("messages"):
        place = messages_name + place.removeprefix("messages")
    if place is not None and not words.startswith(f"Invalid '{place}"):
        words = f"{place}: {words}"
    return InvalidRequest(words, param=place)


def _place(said: str, convert: Convert, messages: Items, tools: Items) -> str | None:
    if named := _NAMED_PLACE.match(said):
        return named.group(1)
    same = _position_free(said)

    def fails(tried_messages: Items, tried_tools: Items) -> bool:
        try:
            convert(tried_messages, tried_tools)
        except REFUSALS as error:
            return _position_free(_said(error)) == same
        return False

    if fails(_HELLO, ()):
        return None
    if not any(phrase in said for phrase in _ABOUT_NEIGHBOURS):
        for index, message in enumerate(messages[:_MOST_TRIED]):
            if fails((message,), ()):
                return f"messages[{index}]"
        for index, tool in enumerate(tools[:_MOST_TRIED]):
            if fails(_HELLO, (tool,)):
                return f"tools[{index}]"
    if fails(messages, ()):
        return "messages"
    return "tools" if fails(_HELLO, tools) else None


def _position_free(said: str) -> str:
    return _POSITION.sub("", said)


def _said(error: Exception) -> str:
    if isinstance(error, recipe.ConversionError):
        try:
            return str(orjson.loads(error.body)["error"]["message"])
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return str(error.body)
    return str(error).removeprefix("invalid request body: ")


def _in_plain_words(said: str) -> str:
    """Serde's sentences without its type names; other text as it is, cut."""
    if found := _MISSING.fullmatch(said):
        return f"the field {found.group(1)!r} is missing"
    if found := _VARIANT.fullmatch(said):
        known = found.group(2).replace("`", "")
        return f"{quoted(found.group(1))} is not known here, expected {known}"
    if found := _WRONG_TYPE.fullmatch(said):
        wanted = found.group(2)
        for name, plain in _WANTED.items():
            if wanted.startswith(name):
                wanted = plain
        return f"{_FOUND.get(found.group(1), 'another type')} stands where {wanted} is expected"
    if "recursion limit" in said.lower():
        return "nested too deeply"
    return said if len(said) <= _LONGEST_TEXT else said[:_LONGEST_TEXT] + "..."
