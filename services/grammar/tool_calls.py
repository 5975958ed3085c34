"""Tool calls in DSML as a grammar, so that arguments fit the schemas of the tools.

```
<M calls>
<M invoke name="F">
<M parameter name="P" string="true">raw text</M parameter>
<M parameter name="Q" string="false">JSON</M parameter>
</M invoke>
</M calls>
```
M is one token, the marker, which plain text never holds: it ends a raw value wherever it stands. Parameters come in the
order of the schema. A parameter that is a plain string is raw text, one that is no string is JSON, and one that may be
either, or a string under rules that raw text cannot be held to (``pattern``, ``format``), is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar.formats import guided, quoted
from epdserve.services.sampling import Grammar, GrammarKind

_ANNOTATIONS: Final = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
_RAW_RULES: Final = frozenset({"enum", "const", "minLength", "maxLength"})
_SHARED: Final = ("$defs", "definitions")
_LONGEST_COUNT: Final = 100_000
_UNSPEAKABLE: Final = re.compile(r'["<>\n]')  # would end the tag it stands in


class Start(Enum):
    """Where the constrained text begins."""

    CONTENT = "content"  # where an answer without text before its calls would begin
    MARKER = "marker"  # behind the marker that begins the block
    BLOCK = "block"  # behind the line that begins the block


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called.

    Attributes:
        parameters: A JSON schema of an object; None takes any.
        strict: Refuse what cannot be enforced; otherwise it is ignored.
    """

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool = False


def tool_calls(
    tools: Sequence[Tool],
    *,
    marker_id: int,
    start: Start,
    many: bool,
    after_token: int | None = None,
    forbidden_before: tuple[int, ...] = (),
) -> Grammar:
    """A grammar of calls.

    Args:
        marker_id: Token id of the marker.
        many: Whether there may be more than one call.
        after_token, forbidden_before: As in ``Grammar``. Calls of a free answer: ``start=MARKER`` after the marker.

    Raises:
        InvalidRequest: No tool, or a strict one whose schema cannot be enforced.
    """
    if not tools:
        raise InvalidRequest("no tool may be called", param="tools")
    writer = _Writer(f"<[{marker_id}]>")
    calls = [writer.invoke(number, tool) for number, tool in enumerate(tools)]
    calls_rule = "invoke+" if many else "invoke"
    begin = {
        Start.CONTENT: rf'"\n\n<" {writer.marker} " calls>\n" ',
        Start.MARKER: r'" calls>\n" ',
        Start.BLOCK: "",
    }[start]
    rules = [
        # every line ends with its break: a literal that began with one would be taken for its neighbour's
        rf'start: {begin}{calls_rule} "</" {writer.marker} " calls>"',
        f"invoke: {' | '.join(calls)}",
        r"RAW: /(?s:.*)<\//",
        *writer.rules,
    ]
    return Grammar(
        GrammarKind.LARK,
        "\n".join(rules),
        after_token=after_token,
        forbidden_before=forbidden_before,
    )


class _Writer:
    """Rules of one grammar. Every parameter is written as the line that it takes, line break included."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.rules: list[str] = []
        self._generic = False

    def invoke(self, number: int, tool: Tool) -> str:
        """The rule of a tool's calls; returns its name."""
        name = f"call_{number}"
        begin = rf'"<" {self.marker} {quoted(f" invoke name={json.dumps(tool.name)}>")} "\n"'
        end = rf'"</" {self.marker} " invoke>\n"'
        self.rules.append(f"{name}: {begin} {self._body(number, tool)} {end}")
        return name

    def _body(self, number: int, tool: Tool) -> str:
        properties = _properties(tool)
        if properties is None:
            return rf'("\n" | {self._any_parameter()}+)'
        schema = tool.parameters or {}
        required = set(schema.get("required", ()))
        shared = {key: schema[key] for key in _SHARED if key in schema}
        parts = []
        for index, (key, value) in enumerate(properties.items()):
            if _UNSPEAKABLE.search(key):
                message = f"a parameter of {tool.name} has a name that no call can hold"
                raise InvalidRequest(message, param="tools")
            rule = f"p_{number}_{index}"
            forms = self._forms(rule, value, shared, strict=tool.strict)
            self.rules.append(f"{rule}: {self._parameter(_name_of(key), forms)}")
            parts.append(rule if key in required else f"{rule}?")
        if required:
            return " ".join(parts)
        # a body without any parameter is an empty line
        return rf'("\n" | {" ".join(parts)})' if parts else r'"\n"'

    def _parameter(self, name: str, forms: Sequence[str]) -> str:
        end = rf'{self.marker} " parameter>\n"'
        return f'"<" {self.marker} {name} ({" | ".join(forms)}) {end}'

    def _forms(self, rule: str, schema: Any, shared: Mapping[str, Any], *, strict: bool) -> list[str]:
        """Values a parameter may have, each with what stands before it, up to the marker that ends it."""
        raw = _raw_value(schema)
        if raw is not None:
            return [rf'" string=\"true\">" {raw}']
        value = {**shared, **schema} if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}
        body = json.dumps(guided(value, strict=strict), ensure_ascii=False)
        self.rules.append(f"{rule}_json: %json {body}")
        return [rf'" string=\"false\">" {rule}_json "</"']

    def _any_parameter(self) -> str:
        """The rule of a parameter of which nothing is known."""
        if not self._generic:
            self._generic = True
            forms = [r'" string=\"true\">" RAW', r'" string=\"false\">" any_json "</"']
            name = r'" parameter name=\"" /[^"<>\n]+/ "\""'
            self.rules += [f"any_parameter: {self._parameter(name, forms)}", "any_json: %json {}"]
        return "any_parameter"


def _name_of(key: str) -> str:
    """The beginning of a parameter's tag, up to its name."""
    return quoted(f' parameter name="{key}"')


def _properties(tool: Tool) -> Mapping[str, Any] | None:
    """Parameters by name; None if anything goes.

    Raises:
        InvalidRequest: A strict tool whose parameters are no object with names.
    """
    schema = tool.parameters
    if schema is None:
        return None
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidRequest(f"the parameters of {tool.name} must be an object schema", param="tools")
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        raise InvalidRequest(f"the parameters of {tool.name} are no valid schema", param="tools")
    known = {"properties", "required", "additionalProperties", "$schema", "$id", *_SHARED, *_ANNOTATIONS}
    unknown = sorted(key for key in schema if key not in known and not key.startswith("x-"))
    missing = [key for key in required if key not in properties]
    if tool.strict and (unknown or missing):
        what = f"{unknown[0]} at the top" if unknown else f"{missing[0]!r} required but not described"
        raise InvalidRequest(f"strict tool {tool.name}: {what} cannot be enforced", param="tools")
    closed = schema.get("additionalProperties", True) is False
    if missing or (not properties and not closed and not tool.strict):
        return None
    return properties


def _raw_value(schema: Any) -> str | None:
    """The value of a plain string parameter with the ``</`` behind it; None if it has to be JSON."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return None
    rules = {key for key in schema if key not in _ANNOTATIONS and not key.startswith("x-")}
    if not rules:
        return "RAW"
    if not rules <= _RAW_RULES:
        return None
    if rules & {"enum", "const"}:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        usable = isinstance(values, Sequence) and all(isinstance(value, str) for value in values)
        return (
            f"({' | '.join(quoted(value + '</') for value in values)})"
            if usable and len(rules) == 1
            else None
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    counts = [count for count in (least, most) if count != ""]
    if not all(isinstance(count, int) and 0 <= count <= _LONGEST_COUNT for count in counts):
        return None
    return rf"/(?s:.{{{least},{most}}})<\//"
