"""The body of a Responses request. Items and tools are the recipe's to check, everything else is checked here.

Nothing is stored: ``store``, ``previous_response_id``, ``conversation``, ``background`` and ``include`` (but for
log-probabilities) are accepted and have no effect (spec 6.6). Hosted tools are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.answer_format import AnswerFormat, of_response_format
from epdserve.services.router.effort import EFFORTS_TAKEN
from epdserve.services.router.fields import Body, Part, TokenCount, Top
from epdserve.services.router.options import Options
from epdserve.services.router.tools import Declared, Mode, Wish
from pydantic import StrictBool, StrictInt, StrictStr

_SERVED_TOOLS: Final = ("function", "custom", "namespace")
_LOGPROBS: Final = "message.output_text.logprobs"


class Reasoning(Part):
    """``reasoning``."""

    effort: StrictStr | StrictInt | None = None
    summary: StrictStr | None = None


class Text(Part):
    """``text``."""

    format: dict[str, Any] | None = None
    verbosity: StrictStr | None = None


class ResponsesBody(Body):
    """``POST /v1/responses``."""

    objects: ClassVar = Body.objects | {"reasoning", "text"}
    words: ClassVar = {**Body.words, "reasoning.effort": EFFORTS_TAKEN}

    input: StrictStr | list[dict[str, Any]] | None = None
    instructions: StrictStr | None = None
    max_output_tokens: TokenCount | None = None
    max_tool_calls: StrictInt | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    top_logprobs: Top | None = None
    include: list[StrictStr] | None = None
    metadata: dict[str, Any] | None = None
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    truncation: Any = None
    service_tier: Any = None
    prompt_cache_key: StrictStr | None = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    stream_options: Any = None

    @property
    def asked_effort(self) -> str | int | None:
        """``reasoning.effort``."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return self.input or []

    def options(self) -> Options:
        """What is asked for besides the prompt."""
        told = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        return Options(
            **self.common(),
            max_tokens=self.max_output_tokens,
            parallel_calls=self.parallel_tool_calls is not False,
            logprobs=(self.top_logprobs or 0) if told else None,
        )

    def answer_format(self) -> AnswerFormat:
        """What the content has to look like.

        Raises:
            InvalidRequest: No schema where one belongs.
        """
        return of_response_format(None if self.text is None else self.text.format, param="text")

    def wish(self) -> Wish:
        """The tool choice.

        Raises:
            InvalidRequest: A choice that nobody knows.
        """
        choice, several = self.tool_choice, self.parallel_tool_calls
        modes: tuple[Mode, ...] = ("none", "auto", "required")
        for mode in modes:
            if choice == mode:
                return Wish(mode, None, several)
        if choice is None:
            return Wish("auto", None, several)
        if isinstance(choice, Mapping):
            kind, name = choice.get("type"), choice.get("name")
            if kind in ("function", "custom") and isinstance(name, str):
                return Wish("required", (name,), False)
            tools = choice.get("tools")
            if kind == "allowed_tools" and isinstance(tools, list):
                names = [tool.get("name") for tool in tools if isinstance(tool, Mapping)]
                only = tuple(name for name in names if isinstance(name, str))
                return Wish("required" if choice.get("mode") == "required" else "auto", only, several)
            if isinstance(kind, str) and kind.startswith("web_search"):
                return Wish("auto", None, several)  # left out with the tool itself
        raise InvalidRequest(
            "tool_choice must be none, auto, required or an object that names a tool", param="tool_choice"
        )

    def declared(self) -> list[Declared]:
        """The tools that are served; a namespace counts as one."""
        found = []
        for tool in self.tools or ():
            if tool.get("type") not in _SERVED_TOOLS:
                continue
            name, schema = tool.get("name"), tool.get("parameters")
            found.append(
                Declared(
                    name if isinstance(name, str) else "",
                    schema if isinstance(schema, Mapping) else {},
                    tool.get("type") == "function" and tool.get("strict") is True,
                    tool,
                )
            )
        return found
