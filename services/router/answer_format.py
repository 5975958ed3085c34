"""What an answer's content has to look like: ``response_format`` and its many cousins, resolved to one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar import formats
from epdserve.services.grammar.ebnf import is_ebnf, lark_of
from epdserve.services.sampling import Grammar, GrammarKind


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """At most one of these is set.

    Attributes:
        any_json: Any JSON object.
        schema: JSON of this schema; ``strict`` refuses what of it cannot be enforced, otherwise that is ignored.
        grammar: Text of this grammar; unlike the other two, the prompt does not tell the model.
    """

    any_json: bool = False
    schema: Mapping[str, Any] | None = None
    grammar: Grammar | None = None
    strict: bool = False

    @property
    def rendered(self) -> bool:
        """Whether the prompt tells the model."""
        return self.any_json or self.schema is not None

    @property
    def free(self) -> bool:
        """Whether any text will do."""
        return not self.rendered and self.grammar is None


def of_response_format(value: Mapping[str, Any] | None, *, param: str = "response_format") -> AnswerFormat:
    """``response_format`` of a chat, or ``text.format`` of a response.

    Raises:
        InvalidRequest: An unknown type, or no schema where one belongs.
    """
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return AnswerFormat()
    if kind == "json_object":
        return AnswerFormat(any_json=True)
    if kind == "json_schema":
        holder = value.get("json_schema", value)
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"{param} of type json_schema needs a schema that is an object", param=param)
        return AnswerFormat(schema=schema, strict=holder.get("strict") is True)
    raise InvalidRequest(f"{param}.type must be one of text, json_object, json_schema", param=param)


def of_structured_outputs(value: Mapping[str, Any], *, param: str = "structured_outputs") -> AnswerFormat:
    """vLLM's ``structured_outputs``: json, regex, choice or grammar.

    Raises:
        InvalidRequest: None or several of them, or a value of the wrong type.
    """
    given = {name: one for name, one in value.items() if name in _READERS and one is not None}
    if len(given) != 1:
        raise InvalidRequest(f"{param} takes exactly one of {', '.join(_READERS)}", param=param)
    ((name, asked),) = given.items()
    return _READERS[name](asked, param)


# Older names for parts of structured_outputs, as vLLM and SGLang had them
OLD_NAMES: Final[dict[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "ebnf": "grammar",
    "json_schema": "json",
    "regex": "regex",
}


def of_fields(
    response_format: Mapping[str, Any] | None,
    structured_outputs: Mapping[str, Any] | None,
    extra: Mapping[str, Any],
) -> AnswerFormat:
    """What the content has to look like, by whichever name a body asks for it.

    Args:
        extra: Fields of the body that have no place of their own; older names are looked for among them.

    Raises:
        InvalidRequest: Asked for twice, or wrongly.
    """
    found = of_response_format(response_format)
    asked = [] if found.free else [found]
    if structured_outputs is not None:
        asked.append(of_structured_outputs(structured_outputs))
    for name, member in OLD_NAMES.items():
        if (value := extra.get(name)) is not None:
            asked.append(of_structured_outputs({member: value}, param=name))
    if len(asked) > 1:
        raise InvalidRequest("the answer's format is asked for more than once", param="response_format")
    return asked[0] if asked else AnswerFormat()


def _of_json(value: Any, param: str) -> AnswerFormat:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise InvalidRequest(f"{param}: the schema is not valid JSON", param=param) from None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param}: a schema must be an object", param=param)
    return AnswerFormat(schema=value)


def _of_choice(value: Any, param: str) -> AnswerFormat:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
        raise InvalidRequest(f"{param}: choice must be a list of strings that are not empty", param=param)
    return AnswerFormat(grammar=formats.choice(value))


def _of_text(kind: GrammarKind, value: Any, param: str) -> AnswerFormat:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param}: expected a string that is not empty", param=param)
    return AnswerFormat(grammar=Grammar(kind, value))


def _of_grammar(value: Any, param: str) -> AnswerFormat:
    """Lark, or EBNF as SGLang and vLLM take it."""
    if isinstance(value, str) and is_ebnf(value):
        value = lark_of(value, param=param)
    return _of_text(GrammarKind.LARK, value, param)


_READERS: Final[dict[str, Callable[[Any, str], AnswerFormat]]] = {
    "json": _of_json,
    "regex": partial(_of_text, GrammarKind.REGEX),
    "choice": _of_choice,
    "grammar": _of_grammar,
}
