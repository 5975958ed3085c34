"""The body of a Messages request. Messages and tools are the recipe's to check, everything else is checked here.

Ignored as the official service does (spec 6.6): ``anthropic-version``, ``container``, ``mcp_servers``,
``service_tier``, ``budget_tokens``. ``top_k`` is honoured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.answer_format import AnswerFormat, of_response_format
from epdserve.services.router.effort import EFFORTS_TAKEN, SWITCHES_TAKEN
from epdserve.services.router.fields import MOST_STOPS, Body, Part, StopString
from epdserve.services.router.options import Options
from epdserve.services.router.tools import Declared, Mode, Wish
from pydantic import Field, StrictInt, StrictStr

_MODES: Final[dict[str, Mode]] = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


class ThinkingSwitch(Part):
    """``thinking``; its budget is ignored."""

    type: StrictStr


class OutputConfig(Part):
    """``output_config``."""

    effort: StrictStr | StrictInt | None = None
    format: dict[str, Any] | None = None


class Metadata(Part):
    """``metadata``."""

    user_id: StrictStr | None = None


class MessagesBody(Body):
    """``POST /v1/messages``."""

    objects: ClassVar = Body.objects | {"thinking", "output_config", "metadata"}
    words: ClassVar = {
        **Body.words,
        "thinking": f'an object whose "type" is {SWITCHES_TAKEN}',
        "thinking.type": SWITCHES_TAKEN,
        "output_config.effort": EFFORTS_TAKEN,
    }

    messages: list[dict[str, Any]]
    system: StrictStr | list[dict[str, Any]] | None = None
    # No upper bound: more than there is room for is lowered, not refused
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**31)] | None = None
    thinking: ThinkingSwitch | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    metadata: Metadata | None = None
    container: Any = None
    mcp_servers: Any = None
    service_tier: Any = None

    @property
    def asked_effort(self) -> str | int | None:
        """``output_config.effort``."""
        return None if self.output_config is None else self.output_config.effort

    def options(self) -> Options:
        """What is asked for besides the prompt."""
        common = self.common()
        if self.metadata is not None and self.metadata.user_id:
            common["user"] = self.metadata.user_id
        return Options(
            **common,
            max_tokens=self.max_tokens,
            lower_max_tokens=True,
            stops=tuple(self.stop_sequences or ()),
            parallel_calls=self.wish().several is not False,
        )

    def answer_format(self) -> AnswerFormat:
        """What the content has to look like.

        Raises:
            InvalidRequest: No schema where one belongs.
        """
        told = self.output_config.format if self.output_config is not None else None
        return of_response_format(told if told is not None else self.output_format, param="output_config")

    def wish(self) -> Wish:
        """The tool choice.

        Raises:
            InvalidRequest: A choice that nobody knows.
        """
        choice = self.tool_choice
        if choice is None:
            return Wish()
        kind, name = choice.get("type"), choice.get("name")
        named = isinstance(name, str) and kind == "tool"
        if kind not in _MODES or (kind == "tool" and not named):
            raise InvalidRequest(
                "tool_choice.type must be auto, any, none or tool with a name", param="tool_choice"
            )
        several = (
            None
            if choice.get("disable_parallel_tool_use") is None
            else not choice["disable_parallel_tool_use"]
        )
        return Wish(_MODES[kind], (str(name),) if named else None, several)

    def declared(self) -> list[Declared]:
        """The tools; what is none of ours is left for the recipe to refuse."""
        found = []
        for tool in self.tools or ():
            name, schema = tool.get("name"), tool.get("input_schema")
            found.append(
                Declared(
                    name if isinstance(name, str) else "",
                    schema if isinstance(schema, Mapping) else {},
                    tool.get("strict") is True,
                    tool,
                )
            )
        return found
