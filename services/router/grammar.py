"""Which grammar a request's output must follow: content, calls or either, and from where on.

What the grammars say stands in ``services/grammar``; decode workers run them. Content is constrained after the
reasoning; a forced call stands right after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.grammar import formats
from epdserve.services.grammar.tool_calls import Start, Tool, tool_calls
from epdserve.services.router.answer_format import AnswerFormat
from epdserve.services.sampling import Grammar, GrammarKind

# A schema deeper than this is nobody's; what walks it may recurse
_DEEPEST: Final = 64


class Calling(Enum):
    """What a request says about calls."""

    FREE = "free"  # may come, as they like
    STRICT = "strict"  # may come, then as their schemas say
    FORCED = "forced"  # must come, as their schemas say


@dataclass(frozen=True, slots=True)
class Expected:
    """What an output may be.

    Attributes:
        tools: Functions that may be called.
        several: More than one call may come.
        in_calls: The prompt has opened the block of calls.
    """

    content: AnswerFormat
    calling: Calling = Calling.FREE
    tools: Sequence[Tool] = ()
    several: bool = True
    in_calls: bool = False


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids that say where things begin and end; ``think_end`` is None if the output begins after the reasoning."""

    dsml: int
    eos: int
    think_end: int | None = None


def grammar_for(expected: Expected, markers: Markers, *, read_tokens: int = 0) -> Grammar | None:
    """The grammar, None if any output will do.

    Args:
        read_tokens: As ``Grammar`` has it; not told to a grammar that waits for the end of the reasoning.

    Raises:
        InvalidRequest: Tools that no call can hold, or a combination that is not served.
    """
    content, tools = expected.content, expected.tools
    # Calls inside the reasoning would go past a grammar that waits for its end
    held = () if markers.think_end is None else (markers.eos, markers.dsml)
    if tools and expected.calling is Calling.FORCED:
        start = Start.BLOCK if expected.in_calls else Start.CONTENT
        calls = _calls(expected, markers, start)
        return replace(calls, after_token=markers.think_end, forbidden_before=held)
    if content.free:
        if not tools or expected.calling is Calling.FREE:
            return None
        return replace(_calls(expected, markers, Start.MARKER), after_token=markers.dsml)
    grammar = _content(content)
    if tools:
        grammar = _either(grammar, _calls(expected, markers, Start.CONTENT))
    if markers.think_end is None:
        return replace(grammar, read_tokens=read_tokens)
    return replace(grammar, after_token=markers.think_end, forbidden_before=held if tools else held[:1])


def _calls(expected: Expected, markers: Markers, start: Start) -> Grammar:
    return tool_calls(expected.tools, marker_id=markers.dsml, start=start, many=expected.several)


def _content(content: AnswerFormat) -> Grammar:
    if content.grammar is not None:
        return content.grammar
    if content.schema is None:
        return formats.json_object()
    return formats.json_schema(content.schema, strict=content.strict)


def _either(content: Grammar, calls: Grammar) -> Grammar:
    """Content or calls."""
    if content.kind is GrammarKind.LARK:
        raise InvalidRequest("a grammar of the content does not go with tools", param="structured_outputs")
    rule = f"%json {content.text}"
    if content.kind is GrammarKind.REGEX:
        rule = "/" + content.text.replace("/", r"\/") + "/"
    text = calls.text.replace("start: ", "calls: ", 1)
    return Grammar(GrammarKind.LARK, f"start: content | calls\ncontent: {rule}\n{text}")


def check_schema(schema: Any, *, param: str) -> None:
    """Refuse a schema that nothing should walk.

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
