"""Which tools a request may, must or must not call; one value for prompt, parser and grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.grammar import Calling, check_schema
from epdserve.services.router.http_errors import quoted

Mode: TypeAlias = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Wish:
    """A tool choice in no protocol's words.

    Attributes:
        only: Names that may be called; None = all.
        several: Whether more than one call may come; None = not said.
    """

    mode: Mode = "auto"
    only: tuple[str, ...] | None = None
    several: bool | None = None


@dataclass(frozen=True, slots=True)
class Declared:
    """One tool: its name, its schema, and whether calls must follow it; ``raw`` as the protocol has it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What became of tools and choice.

    Attributes:
        tools: What the prompt declares, as the protocol has them.
        mode: The choice as the recipe takes it.
        strict: Names of functions whose schemas are enforced.
        schemas: Parameters of each function as the client sent them: the recipe drops definitions that they share.
        several: More than one call may come.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    mode: Mode = "auto"
    calling: Calling = Calling.FREE
    strict: frozenset[str] = frozenset()
    several: bool = True
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def plan_tools(
    declared: Sequence[Declared], wish: Wish, *, thinking: bool, strict_official: bool = False
) -> ToolPlan:
    """Resolve tools and choice.

    Thinking and a forced call go together here: the reasoning is free and the grammar forces the call after it. The
    recipe, which would open the block of calls in the prompt, hears "auto" then.

    Raises:
        InvalidRequest: A choice that names an unknown tool, or one that the official service refuses in its mode.
    """
    names = [tool.name for tool in declared]
    for name in wish.only or ():
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names the tool {quoted(name)}, which tools lacks", param="tool_choice"
            )
    kept = [tool for tool in declared if wish.only is None or tool.name in wish.only]
    if not kept or wish.mode == "none":
        return ToolPlan(tuple(tool.raw for tool in kept), "none" if kept else "auto")
    for tool in kept:
        check_schema(tool.parameters, param="tools")
    forced = wish.mode == "required"
    if forced and thinking and strict_official:
        raise InvalidRequest("Thinking mode does not support this tool_choice", param="tool_choice")
    strict = frozenset(tool.name for tool in kept if tool.strict)
    return ToolPlan(
        tuple(_uniform(kept)),
        "required" if forced and not thinking else "auto",
        Calling.FORCED if forced else Calling.STRICT if strict else Calling.FREE,
        strict,
        # A forced call is one call, unless several were asked for
        wish.several is True if forced else wish.several is not False,
        {tool.name: tool.parameters for tool in kept},
    )


def _uniform(tools: Sequence[Declared]) -> list[Mapping[str, Any]]:
    """The tools as the recipe takes them: it refuses strict ones beside others, the grammar tells them apart."""
    if len({tool.strict for tool in tools}) < 2:
        return [tool.raw for tool in tools]
    return [_without_strict(tool.raw) for tool in tools]


def _without_strict(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = raw.get("function")
    if isinstance(inner, Mapping):
        return {**raw, "function": {name: value for name, value in inner.items() if name != "strict"}}
    return {name: value for name, value in raw.items() if name != "strict"}
