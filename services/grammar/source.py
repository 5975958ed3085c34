"""From a ``Grammar`` to what llguidance takes, and its words about what it does not take."""

from __future__ import annotations

from typing import Final

import llguidance
from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar.limits import GrammarLimits
from epdserve.services.sampling import Grammar, GrammarKind

PARAM: Final = "response_format"

# Between JSON tokens: a blank, or a line break and an indentation; a model must not go on with blanks for ever
JSON_BLANKS: Final = r"( |\n[ \t]{0,40})"

_LONGEST_REASON: Final = 300


def source_of(grammar: Grammar, limits: GrammarLimits) -> str:
    """The library's form of a grammar; not checked beyond its size.

    Raises:
        InvalidRequest: Too long, or a schema that is no JSON.
    """
    size = len(grammar.text.encode())
    most = limits.regex_bytes if grammar.kind is GrammarKind.REGEX else limits.text_bytes
    if size > most:
        raise InvalidRequest(f"a grammar of {size} bytes; at most {most} are taken", param=PARAM)
    match grammar.kind:
        case GrammarKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return llguidance.LLMatcher.grammar_from_lark(grammar.text)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            grammar.text, overrides={"whitespace_pattern": JSON_BLANKS}
        )
    except ValueError as error:
        raise refusal(str(error)) from None


def refusal(reason: str) -> InvalidRequest:
    """The error for a grammar that the library does not take; its reason on one line, cut."""
    line = " ".join(reason.split())
    return InvalidRequest(f"the grammar cannot be used: {line[:_LONGEST_REASON]}", param=PARAM)
