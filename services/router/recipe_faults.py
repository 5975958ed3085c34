"""What the recipe gets wrong in the output of a model (spec 5.4), corrected in this one place; a test names each.

Before the recipe, on token ids:
  parameter without a ``string`` attribute   the recipe breaks its name; the type is taken from the tool's schema
After the recipe, on deltas:
  arguments wrapped in ``arguments`` or ``input``   unwrapped if the schema has no such property
  arguments that are no JSON object                 passed on, and counted
  parallel calls that the request did not want      dropped, and the answer ended

What it gets wrong in requests is corrected in ``rendering.py``; what it says about requests is put into words in
``recipe_refusals.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
from epdserve.services.router.events import Delta, Kind, join
from epdserve.services.router.vocabulary import Vocabulary

Schemas = Mapping[str, Mapping[str, Any]]

_INVOKE: Final = re.compile(rb'\s?invoke\s+name="([^"]*)"')
_PARAMETER: Final = re.compile(rb'\s?parameter\s+name="([^"]*)"(.*)', re.DOTALL)
# A tag that has not ended after so many bytes is none that we know how to mend
_LONGEST_TAG: Final = 1024
_WRAPPERS: Final = ('{"arguments": ', '{"input": ')
_TEXTUAL: Final = frozenset({"string"})


class TagRepair:
    """Gives parameter tags their ``string`` attribute if the model forgot it; everything else passes at once.

    Works on ids, so that whatever is typed in plain characters stays what it is. Only ids of a parameter's opening
    tag are held back, which no field of an answer shows.
    """

    def __init__(self, vocabulary: Vocabulary, dsml_id: int, schemas: Schemas) -> None:
        self._vocabulary = vocabulary
        self._dsml_id = dsml_id
        self._schemas = schemas
        self._function = ""
        self._tag: bytes | None = None  # since the marker; None = not in a tag
        self._held: list[int] = []

    @property
    def idle(self) -> bool:
        """Whether ids other than the calls' marker pass as they are."""
        return self._tag is None

    def push(self, token: int) -> list[int]:
        """Ids that may go on to the recipe."""
        if token == self._dsml_id:
            passed = [*self.flush(), token]
            self._tag = b""
            return passed
        if self._tag is None:
            return [token]
        if self._vocabulary.is_marker(token):
            return [*self.flush(), token]
        before = self._tag
        self._tag += self._vocabulary.bytes_of(token)
        end = _tag_end(self._tag)
        if end is not None:
            return self._close(token, before, end)
        if len(self._tag) > _LONGEST_TAG:
            return [*self.flush(), token]
        if b"parameter".startswith(self._tag.lstrip()[:9]):
            self._held.append(token)
            return []
        passed, self._held = [*self._held, token], []
        return passed

    def flush(self) -> list[int]:
        """What is held, as it came."""
        held, self._held, self._tag = self._held, [], None
        return held

    def _close(self, token: int, before: bytes, end: int) -> list[int]:
        """The tag is complete with this id; mend it if it needs to be."""
        assert self._tag is not None
        tag = self._tag
        passed = self.flush()
        if found := _INVOKE.match(tag[:end]):
            self._function = found.group(1).decode("utf-8", "replace")
        found = _PARAMETER.match(tag[:end])
        if found is None or b"string=" in found.group(2):
            return [*passed, token]
        attribute = self._attribute(found.group(1).decode("utf-8", "replace"))
        mended = tag[len(before) : end] + attribute + tag[end:]
        byte_ids = self._vocabulary.byte_ids
        if any(byte not in byte_ids for byte in mended):
            return [*passed, token]
        return [*passed, *(byte_ids[byte] for byte in mended)]

    def _attribute(self, parameter: str) -> bytes:
        schema = self._schemas.get(self._function, {}).get("properties", {}).get(parameter)
        return b' string="true"' if _takes_text(schema) else b' string="false"'


def _tag_end(tag: bytes) -> int | None:
    """Where the ``>`` of a tag stands; one inside quotes is none."""
    quoted = False
    for place, byte in enumerate(tag):
        if byte == 0x22:
            quoted = not quoted
        elif byte == 0x3E and not quoted:
            return place
    return None


def _takes_text(schema: object) -> bool:
    """Whether a value of this schema is a string; an unknown type is one."""
    if not isinstance(schema, Mapping):
        return True
    declared = schema.get("type")
    if declared is None:
        branches = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(branches, list) and branches:
            return any(_takes_text(branch) for branch in branches)
        values = schema.get("enum")
        return not isinstance(values, list) or any(isinstance(value, str) for value in values)
    return bool(_TEXTUAL & set(declared if isinstance(declared, list) else [declared]))


class CallTolerance:
    """Passes deltas of tool calls on, mended; deltas of other fields are not for it.

    Attributes:
        invalid: Calls whose arguments were no JSON object.
        ended: The one call that was wanted is complete.
    """

    def __init__(self, schemas: Schemas, *, unwrap: bool = True, parallel: bool = True) -> None:
        self._schemas = schemas
        self._unwrap = unwrap
        self._parallel = parallel
        self._index = -1
        self._text: list[str] = []
        self._held = ""
        self._may_be_wrapped = False
        self.invalid = 0
        self.ended = False

    def push(self, delta: Delta, deltas: list[Delta]) -> None:
        """Append to ``deltas`` what may leave."""
        if delta.kind is Kind.CALL:
            self.finish(deltas, complete=True)
            if self._index >= 0 and not self._parallel:
                self.ended = True
                return
            self._begin(delta)
            deltas.append(delta)
            return
        self._text.append(delta.text)
        if not self._may_be_wrapped:
            join(delta, deltas)
            return
        self._held += delta.text
        if not any(_agree(self._held, wrapper) for wrapper in self._wrappers):
            self._may_be_wrapped = False
            self._let_out(self._held, deltas)

    def finish(self, deltas: list[Delta], *, complete: bool) -> None:
        """The call is over; ``complete`` if the model ended it and not a limit."""
        if self._index < 0:
            return
        text = "".join(self._text)
        if self._may_be_wrapped:
            inner = _unwrapped(text) if complete else None
            text = text if inner is None else inner
            self._let_out(text, deltas)
            self._may_be_wrapped = False
        if complete and self._text and not isinstance(_json(text), dict):
            self.invalid += 1
        self._text = []

    def _begin(self, delta: Delta) -> None:
        properties = self._schemas.get(delta.text, {}).get("properties", {})
        known = properties if isinstance(properties, Mapping) else {}
        self._wrappers = [wrapper for wrapper in _WRAPPERS if wrapper[2:-3] not in known]
        self._may_be_wrapped = self._unwrap and bool(self._wrappers)
        self._index, self._held, self._text = delta.index, "", []

    def _let_out(self, text: str, deltas: list[Delta]) -> None:
        if text:
            join(Delta(Kind.ARGUMENTS, text, self._index), deltas)


def _agree(text: str, wrapper: str) -> bool:
    return text.startswith(wrapper) or wrapper.startswith(text)


def _unwrapped(text: str) -> str | None:
    """The inner object of ``{"arguments": {...}}``, also if it is a string that holds one; None if there is none."""
    outer = _json(text)
    if not isinstance(outer, dict) or len(outer) != 1:
        return None
    ((name, inner),) = outer.items()
    if isinstance(inner, dict):
        return text[len(name) + 5 : text.rindex("}")]
    return inner if isinstance(inner, str) and isinstance(_json(inner), dict) else None


def _json(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
