"""From a checked Responses body to something that may run. Runs in any thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepseek_recipe as recipe
import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.conversation import Prepared, expected_grammar
from epdserve.services.router.effort import resolve_effort
from epdserve.services.router.http_errors import unknown_model
from epdserve.services.router.options import context_tokens
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.recipe_refusals import REFUSALS, Items, located
from epdserve.services.router.rendering import RECIPE_MODEL, rendered_effort
from epdserve.services.router.responses.body import ResponsesBody
from epdserve.services.router.tools import ToolPlan, plan_tools
from epdserve.services.types import Effort


@dataclass(frozen=True, slots=True)
class Echo:
    """What a response repeats of its request.

    Attributes:
        fields: A response object without output, as the recipe writes it.
        namespaces: Function name to (namespace, local name).
        custom: Names of tools that take text instead of JSON.
    """

    fields: dict[str, Any]
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()


def prepare(body: ResponsesBody, parts: RouterParts) -> tuple[Prepared, Echo]:
    """A checked and rendered request.

    Raises:
        InvalidRequest, ModelNotFound: As the message says; ``param`` names the field.
    """
    if body.model not in parts.model_names:
        raise unknown_model(body.model, parts.model_names)
    config = parts.config
    effort = resolve_effort(
        thinking=None,
        effort=body.asked_effort,
        default_thinking=config.default_thinking,
        default_effort=config.default_effort,
    )
    plan = plan_tools(
        body.declared(), body.wish(), thinking=effort is not None, strict_official=config.strict_official
    )
    answer_format = body.answer_format()
    options = parts.renderer.options
    conversion = _convert(body, plan, effort, options)
    if not conversion.conversation.messages:
        raise InvalidRequest("input holds no message", param="input")
    chat = parts.renderer.encode(conversion, effort, answer_format, max_tokens=context_tokens(parts))
    grammar = expected_grammar(chat, plan, answer_format, parts.tokenizer)
    return Prepared(body.options(), chat, answer_format, grammar), _echo(body, conversion, options)


def _frame(body: ResponsesBody, effort: Effort | None) -> dict[str, Any]:
    frame: dict[str, Any] = {"model": RECIPE_MODEL}
    frame["reasoning"] = {"effort": "none" if effort is None else rendered_effort(effort)}
    if body.instructions is not None:
        frame["instructions"] = body.instructions
    return frame


def _convert(
    body: ResponsesBody, plan: ToolPlan, effort: Effort | None, options: recipe.ConversionOptions
) -> recipe.ConversationRequest:
    frame = _frame(body, effort)

    def convert(items: Items, tools: Items) -> recipe.ConversationRequest:
        asked = {**frame, "input": list(items)} if items else dict(frame)
        if tools:
            asked |= {"tools": list(tools), "tool_choice": plan.mode}
        return recipe.ResponsesRequest(orjson.dumps(asked)).convert(options)

    tools = [dict(tool) for tool in plan.tools]
    try:
        return convert(body.items, tools)
    except REFUSALS as error:
        raise located(error, convert, body.items, tools, messages_name="input") from error


def _echo(
    body: ResponsesBody, conversion: recipe.ConversationRequest, options: recipe.ConversionOptions
) -> Echo:
    """The recipe's own echo, with what it leaves at its default."""
    asked: dict[str, Any] = {"model": RECIPE_MODEL, "input": "x"}
    for name in ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "user"):
        if (value := getattr(body, name)) is not None:
            asked[name] = value
    served = [dict(tool.raw) for tool in body.declared()]
    if served:
        asked["tools"] = served
    request = recipe.ResponsesRequest(orjson.dumps(asked))
    echo, namespaces = request.echo(), request.namespace_tool_map(options)
    generator = recipe.ResponsesRequest.chunk_generator(conversion, "", body.model).with_echo(echo)
    processor = recipe.StreamProcessor(generator, conversion.parsing_options)
    created = orjson.loads(processor.push(recipe.InferenceChunk.ready())[0].to_json())
    fields: dict[str, Any] = created["response"]
    reasoning = body.reasoning
    fields["reasoning"] = {
        "effort": None if reasoning is None else reasoning.effort,
        "summary": None if reasoning is None else reasoning.summary,
    }
    if body.text is not None:
        fields["text"] = {"format": body.text.format or {"type": "text"}, "verbosity": body.text.verbosity}
    if body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice
    fields["parallel_tool_calls"] = body.parallel_tool_calls is not False
    fields["metadata"] = body.metadata or {}
    fields["prompt_cache_key"] = body.prompt_cache_key
    custom = frozenset(tool.name for tool in body.declared() if tool.raw.get("type") == "custom")
    return Echo(fields, namespaces, custom)
