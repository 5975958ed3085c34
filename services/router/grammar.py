"""The grammar that a request's output must follow, as text for the decode worker, which runs it.

Content is constrained after the reasoning; a forced call stands right after it. Values of string parameters are any
text without the marker: a model cannot write their end tag without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.answer_format import AnswerFormat
from epdserve.services.sampling import Grammar, GrammarKind
from llguidance import LLMatcher

Schema = Mapping[str, Any]

_ANY_OBJECT: Final = '{"type":"object"}'
# Both are about what a compiler may take; a schema within them compiles in milliseconds
_LONGEST_TEXT: Final = 256 * 1024
_DEEPEST: Final = 64
_DEFINITIONS: Final = ("$defs", "definitions")


class Calling(Enum):
    """What a request says about calls."""

    FREE = "free"  # may come, as they like
    STRICT = "strict"  # may come, then as their schemas say
    FORCED = "forced"  # must come, as their schemas say


@dataclass(frozen=True, slots=True)
class Expected:
    """What an output may be.

    Attributes:
        functions: Parameters of each function that may be called.
        several: More than one call may come.
        in_calls: The prompt has opened the block of calls.
    """

    content: AnswerFormat
    calling: Calling = Calling.FREE
    functions: Mapping[str, Schema] | None = None
    several: bool = True
    in_calls: bool = False


def grammar_for(
    expected: Expected, *, dsml_id: int, after_token: int | None, read_tokens: int = 0
) -> Grammar | None:
    """The grammar, None if any output will do.

    Args:
        after_token: Ends the reasoning; None if the request does not think.
        read_tokens: As ``Grammar`` has it; not told to a grammar that waits for ``after_token``.

    Raises:
        InvalidRequest: A schema or grammar that cannot be compiled; ``param`` names the field.
    """
    text = _text(expected, dsml_id)
    if text is None:
        return None
    kind, source = text
    read = read_tokens if after_token is None else 0
    grammar = Grammar(kind, source, after_token, read)
    _check(grammar, "tools" if expected.calling is not Calling.FREE else "response_format")
    return grammar


def _text(expected: Expected, dsml_id: int) -> tuple[GrammarKind, str] | None:
    content = expected.content
    if expected.calling is Calling.FREE and not expected.functions:
        if content.grammar is not None:
            return content.grammar.kind, content.grammar.text
        if content.free:
            return None
        return GrammarKind.JSON_SCHEMA, _json(content)
    if expected.calling is Calling.FREE and content.free:
        return None
    return GrammarKind.LARK, _lark(expected, f"<[{dsml_id}]>")


def _json(content: AnswerFormat) -> str:
    return _ANY_OBJECT if content.schema is None else dumped(content.schema)


def _lark(expected: Expected, marker: str) -> str:
    """Content or calls, in llguidance's dialect of Lark."""
    rules = {"start": "", **_call_rules(expected, marker)}
    calls = rules.pop("calls")
    block = f'"<" {marker} " calls>\\n" {calls}'
    if expected.in_calls:
        rules["start"] = calls  # the prompt ends with the opening tag
    elif expected.calling is Calling.FORCED:
        rules["start"] = f'"\\n\\n"? {block}'
    elif expected.content.free:
        # Text, or text that ends in the first letter of a tag whose marker follows
        rules["start"] = "TEXT | BEFORE_TAG " + block.removeprefix('"<" ')
        rules["TEXT"], rules["BEFORE_TAG"] = r"/(.|\n)*/", r"/(.|\n)*</"
    else:
        rules["start"] = f'"\\n\\n"? {block}'
        rules["content"] = _content_rule(expected.content)
    return "\n".join(f"{name}: {body}" for name, body in rules.items())


def _content_rule(content: AnswerFormat) -> str:
    if content.grammar is None:
        return f"%json {_json(content)}"
    if content.grammar.kind is GrammarKind.REGEX:
        return f"/{content.grammar.text.replace('/', chr(92) + '/')}/"
    raise InvalidRequest(
        "a grammar for the content cannot be combined with tools", param="structured_outputs"
    )


def _call_rules(expected: Expected, marker: str) -> dict[str, str]:
    """A rule for each function, and under ``calls`` what stands after the opening tag of the block."""
    rules: dict[str, str] = {}
    names = []
    free = expected.calling is Calling.FREE
    for number, (name, schema) in enumerate((expected.functions or {}).items()):
        rule = f"call{number}"
        names.append(rule)
        parameters = " ".join(["any*"] if free else _parameters(schema, marker))
        head = dumped(f' invoke name="{name}">\n')
        rules[rule] = f'"<" {marker} {head} {parameters} "\\n"? "</" {marker} " invoke>\\n"'
    alternatives = " | ".join(names)
    repeat = "+" if expected.several else ""
    rules["calls"] = f'({alternatives}){repeat} "</" {marker} " calls>"'
    value = r'("\" string=\"true\">" VALUE | "\" string=\"false\">" json "</")'
    rules["any"] = rf'"<" {marker} " parameter name=\"" NAME {value} {marker} " parameter>\n"'
    rules["json"] = "%json {}"
    rules["NAME"] = r'/[^"<>\n]+/'
    rules["VALUE"] = r"/(.|\n)*<\//"
    return rules


def _parameters(schema: Schema, marker: str) -> list[str]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return ["any*"] if schema.get("additionalProperties", True) is not False else []
    required = schema.get("required")
    needed = set(required) if isinstance(required, list) else set()
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return [
        _parameter(name, one, shared, marker) + ("" if name in needed else "?")
        for name, one in properties.items()
    ]


def _parameter(name: str, schema: Any, shared: Mapping[str, Any], marker: str) -> str:
    end = f'{marker} " parameter>\\n"'
    if isinstance(schema, Mapping) and schema.get("type") == "string" and "$ref" not in schema:
        head = dumped(f' parameter name="{name}" string="true">')
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and all(isinstance(value, str) for value in values) and values:
            choice = " | ".join(dumped(value) for value in values)
            return f'("<" {marker} {head} ({choice}) "</" {end})'
        return f'("<" {marker} {head} VALUE {end})'
    head = dumped(f' parameter name="{name}" string="false">')
    whole = {**schema, **shared} if isinstance(schema, Mapping) else {}
    return f'("<" {marker} {head} %json {dumped(whole)} "</" {end})'


def dumped(value: Any) -> str:
    """JSON text, which is how Lark writes strings as well.

    Raises:
        InvalidRequest: Nested too deeply, or something that JSON does not know.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"a schema cannot be used: {error}", param="tools") from None


def check_schema(schema: Any, *, param: str) -> None:
    """Refuse a schema that no compiler should see.

    Raises:
        InvalidRequest: Nested deeper than 64 levels.
    """
    level = [schema]
    for _ in range(_DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, (Mapping, list))
        ]
        if not level:
            return
    raise InvalidRequest(f"{param}: a schema may be nested {_DEEPEST} levels deep", param=param)


def _check(grammar: Grammar, param: str) -> None:
    if len(grammar.text) > _LONGEST_TEXT:
        raise InvalidRequest(
            f"{param}: the schemas are too large: over {_LONGEST_TEXT} characters", param=param
        )
    source = (
        LLMatcher.grammar_from_json_schema(grammar.text)
        if grammar.kind is GrammarKind.JSON_SCHEMA
        else LLMatcher.grammar_from_regex(grammar.text)
        if grammar.kind is GrammarKind.REGEX
        else LLMatcher.grammar_from_lark(grammar.text)
    )
    if problem := LLMatcher.validate_grammar(source, None):
        raise InvalidRequest(f"{param}: {_said(problem)}", param=param)


def _said(problem: str) -> str:
    return problem.splitlines()[0][:300]
