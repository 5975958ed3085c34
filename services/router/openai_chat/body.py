"""The body of a chat request. Messages are the recipe's to check, everything else is checked here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from epdserve.services.errors import InvalidRequest
from epdserve.services.router.answer_format import OLD_NAMES, AnswerFormat, of_fields
from epdserve.services.router.effort import EFFORTS_TAKEN, SWITCHES_TAKEN
from epdserve.services.router.fields import Part, SamplingBody, TokenCount, Top, unless
from epdserve.services.router.options import Options
from epdserve.services.router.tools import Declared, Wish
from pydantic import StrictBool, StrictInt, StrictStr


class ThinkingSwitch(Part):
    """``thinking``."""

    type: StrictStr


class TemplateArguments(Part):
    """``chat_template_kwargs`` as vLLM and SGLang take them."""

    thinking: StrictBool | None = None
    enable_thinking: StrictBool | None = None
    reasoning_effort: StrictStr | StrictInt | None = None


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    unserved: ClassVar = {
        "best_of": unless(1),
        "bad_words": unless([]),
        "functions": unless([]),
        "function_call": unless("none", "auto"),
        "modalities": unless(["text"]),
        "audio": unless(),
        "web_search_options": unless(),
        "skip_special_tokens": unless(True),
        "echo": unless(False),
        "thinking_token_budget": unless(),
        "return_token_ids": unless(False),
    }
    objects: ClassVar = SamplingBody.objects | {"thinking", "chat_template_kwargs"}
    words: ClassVar = {
        **SamplingBody.words,
        "thinking": f'an object whose "type" is {SWITCHES_TAKEN}',
        "thinking.type": SWITCHES_TAKEN,
        "chat_template_kwargs": "an object",
        "chat_template_kwargs.reasoning_effort": EFFORTS_TAKEN,
        "reasoning_effort": EFFORTS_TAKEN,
        "tool_choice": "none, auto, required or an object that names a function",
        "response_format": 'an object whose "type" is text, json_object or json_schema',
    }

    messages: list[dict[str, Any]]
    thinking: ThinkingSwitch | None = None
    reasoning_effort: StrictStr | StrictInt | None = None
    chat_template_kwargs: TemplateArguments | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: StrictStr | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Top | None = None
    continue_final_message: StrictBool | None = None
    add_generation_prompt: StrictBool | None = None
    effort_floor: StrictInt | None = None

    @property
    def thinking_switch(self) -> str | None:
        """``thinking.type``, else what the template arguments say."""
        if self.thinking is not None:
            return self.thinking.type
        extra = self.chat_template_kwargs
        chosen = (
            None if extra is None else extra.thinking if extra.thinking is not None else extra.enable_thinking
        )
        return None if chosen is None else "enabled" if chosen else "disabled"

    @property
    def asked_effort(self) -> str | int | None:
        """``reasoning_effort``, else what the template arguments say."""
        if self.reasoning_effort is not None or self.chat_template_kwargs is None:
            return self.reasoning_effort
        return self.chat_template_kwargs.reasoning_effort

    @property
    def unknown(self) -> int:
        """How many fields of the body nobody knows."""
        return sum(name not in self.unserved and name not in OLD_NAMES for name in self.model_extra or ())

    def options(self) -> Options:
        """What is asked for besides the prompt.

        Raises:
            InvalidRequest: Alternatives of log-probabilities that were not asked for, or an impossible floor.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs = true", param="top_logprobs")
        if self.effort_floor is not None and not 1 <= self.effort_floor <= 100:
            raise InvalidRequest("effort_floor must lie in 1..100", param="effort_floor")
        common = self.common()
        if self.max_tokens is None:
            common["max_tokens"] = self.max_completion_tokens
        return Options(
            **common,
            parallel_calls=self.parallel_tool_calls is not False,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def answer_format(self) -> AnswerFormat:
        """What the content has to look like. Raises as ``of_fields``."""
        return of_fields(self.response_format, self.structured_outputs, self.model_extra or {})

    def wish(self) -> Wish:
        """The tool choice.

        Raises:
            InvalidRequest: A choice that nobody knows.
        """
        choice, several = self.tool_choice, self.parallel_tool_calls
        if choice is None or choice in ("none", "auto", "required"):
            return Wish(choice or "auto", None, several)  # type: ignore[arg-type]
        if isinstance(choice, Mapping):
            if choice.get("type") == "allowed_tools" and isinstance(choice.get("allowed_tools"), Mapping):
                allowed = choice["allowed_tools"]
                if allowed.get("mode") in ("auto", "required") and isinstance(allowed.get("tools"), list):
                    return Wish(allowed["mode"], tuple(map(_name_of, allowed["tools"])), several)
            elif name := _name_of(choice):
                return Wish("required", (name,), False)
        raise InvalidRequest(f"tool_choice must be {self.words['tool_choice']}", param="tool_choice")

    def declared(self) -> list[Declared]:
        """The tools; what is no function is left for the recipe to refuse."""
        found = []
        for tool in self.tools or ():
            function = tool.get("function")
            inner = function if isinstance(function, Mapping) else {}
            parameters = inner.get("parameters")
            found.append(
                Declared(
                    _name_of(tool),
                    parameters if isinstance(parameters, Mapping) else {},
                    inner.get("strict") is True,
                    tool,
                )
            )
        return found

    def conversation(self) -> list[dict[str, Any]]:
        """The messages, with the last one marked if it is to be continued.

        Raises:
            InvalidRequest: Nothing to continue, or no generation header asked for without it.
        """
        if self.continue_final_message:
            if not self.messages or self.messages[-1].get("role") != "assistant":
                raise InvalidRequest(
                    "continue_final_message needs an assistant message at the end", param="messages"
                )
            return [*self.messages[:-1], {**self.messages[-1], "prefix": True}]
        if self.add_generation_prompt is False:
            raise InvalidRequest(
                "add_generation_prompt = false needs continue_final_message", param="add_generation_prompt"
            )
        return self.messages


def _name_of(holder: object) -> str:
    function = holder.get("function") if isinstance(holder, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""
