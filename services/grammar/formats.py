"""Grammars of whole answers: JSON, a schema, one of some texts, free text with tagged parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar.source import JSON_BLANKS, PARAM
from epdserve.services.sampling import Grammar, GrammarKind

_ANY_OBJECT: Final = {"type": "object"}


def json_object() -> Grammar:
    """Any JSON object."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_ANY_OBJECT))


def json_schema(schema: Mapping[str, Any] | bool, *, strict: bool = True) -> Grammar:
    """JSON of a schema; without ``strict``, keywords that cannot be enforced are ignored instead of refused.

    Raises:
        InvalidRequest: The schema is neither an object nor a boolean.
    """
    if isinstance(schema, bool):
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    if not isinstance(schema, Mapping):
        raise InvalidRequest("a JSON schema must be an object", param=PARAM)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(guided(schema, strict=strict), ensure_ascii=False))


def guided(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """A schema with our rules for blanks and for what cannot be enforced, in place of those it brings."""
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_BLANKS, "lenient": not strict}}


def choice(texts: Sequence[str]) -> Grammar:
    """One of some texts.

    Raises:
        InvalidRequest: None is given, or an empty one.
    """
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest("a choice needs texts that are not empty", param=PARAM)
    return Grammar(GrammarKind.LARK, "start: " + " | ".join(map(quoted, texts)))


def regex(pattern: str) -> Grammar:
    """Text that a regular expression matches as a whole."""
    return Grammar(GrammarKind.REGEX, pattern)


def lark(text: str) -> Grammar:
    """A grammar in llguidance's dialect of Lark; GBNF and EBNF have to be rewritten to it."""
    return Grammar(GrammarKind.LARK, text)


@dataclass(frozen=True, slots=True)
class TaggedPart:
    """A part of a free answer that has a form: what comes between ``begin`` and ``end`` is JSON of a schema."""

    begin: str
    schema: Mapping[str, Any]
    end: str


def structural_tag(parts: Sequence[TaggedPart], triggers: Iterable[str]) -> Grammar:
    """Free text in which each trigger begins one of the parts.

    Raises:
        InvalidRequest: A part that no trigger begins, or an empty trigger.
    """
    triggers = tuple(triggers)
    if not parts or not triggers or not all(triggers):
        raise InvalidRequest("a structural tag needs parts and triggers that are not empty", param=PARAM)
    rules, names = [], []
    for number, part in enumerate(parts):
        trigger = next((text for text in triggers if part.begin.startswith(text)), None)
        if trigger is None:
            raise InvalidRequest(f"no trigger begins part {number} of the structural tag", param=PARAM)
        rest = part.begin[len(trigger) :]
        body = json.dumps(guided(part.schema, strict=True), ensure_ascii=False)
        ends = " ".join(quoted(text) for text in (part.end,) if text)
        names.append(f"part_{number}")
        rules += [
            f"part_{number}: free_{number} {quoted(rest) if rest else ''} json_{number} {ends}",
            # lazy: free text ends at the first trigger it meets
            f"free_{number}[lazy]: /(?s:.*)/ {quoted(trigger)}",
            f"json_{number}: %json {body}",
        ]
    return Grammar(
        GrammarKind.LARK, "\n".join([f"start: ({' | '.join(names)})* rest", "rest: /(?s:.*)/", *rules])
    )


def quoted(text: str) -> str:
    """A text as a literal of the Lark dialect, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)
