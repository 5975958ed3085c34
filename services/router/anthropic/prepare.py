"""From a checked Messages body to something that may run. Runs in any thread."""

from __future__ import annotations

from typing import Any, Final

import deepseek_recipe as recipe
import orjson
from epdserve.services.router.anthropic.body import MessagesBody
from epdserve.services.router.conversation import Prepared, expected_grammar
from epdserve.services.router.effort import resolve_effort
from epdserve.services.router.http_errors import unknown_model
from epdserve.services.router.options import context_tokens
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.recipe_refusals import REFUSALS, Items, located
from epdserve.services.router.rendering import RECIPE_MODEL, rendered_effort, thinking_fields
from epdserve.services.router.tools import ToolPlan, plan_tools
from epdserve.services.types import Effort

_CHOICES: Final = {"auto": "auto", "none": "none", "required": "any"}


def prepare(body: MessagesBody, parts: RouterParts) -> Prepared:
    """A checked and rendered request.

    Clients of this protocol ask for the names they know: all that begin with ``claude-`` are served.

    Raises:
        InvalidRequest, ModelNotFound: As the message says; ``param`` names the field.
    """
    if body.model not in parts.model_names and not body.model.startswith("claude-"):
        raise unknown_model(body.model, parts.model_names)
    config = parts.config
    effort = resolve_effort(
        thinking=None if body.thinking is None else body.thinking.type,
        effort=body.asked_effort,
        default_effort=config.default_effort,
        default_thinking=config.default_thinking,
    )
    plan = plan_tools(
        body.declared(), body.wish(), thinking=effort is not None, strict_official=config.strict_official
    )
    answer_format = body.answer_format()
    conversion = _convert(body, plan, effort, parts.renderer.options)
    chat = parts.renderer.encode(
        _continuing(conversion, body), effort, answer_format, max_tokens=context_tokens(parts)
    )
    grammar = expected_grammar(chat, plan, answer_format, parts.tokenizer)
    return Prepared(body.options(), chat, answer_format, grammar)


def _convert(
    body: MessagesBody, plan: ToolPlan, effort: Effort | None, options: recipe.ConversionOptions
) -> recipe.ConversationRequest:
    frame: dict[str, Any] = {"model": RECIPE_MODEL, "max_tokens": 1, **thinking_fields(effort)}
    if effort is not None:
        frame["output_config"] = {"effort": rendered_effort(effort)}
    if body.system is not None:
        frame["system"] = body.system
    if plan.tools:
        frame["tool_choice"] = {"type": _CHOICES[plan.mode]}

    def convert(messages: Items, tools: Items) -> recipe.ConversationRequest:
        asked = {**frame, "messages": list(messages)}
        if tools:
            asked["tools"] = list(tools)
        else:
            asked.pop("tool_choice", None)
        return recipe.MessagesRequest(orjson.dumps(asked)).convert(options)

    tools = [dict(tool) for tool in plan.tools]
    try:
        return convert(body.messages, tools)
    except REFUSALS as error:
        raise located(error, convert, body.messages, tools) from error


def _continuing(conversion: recipe.ConversationRequest, body: MessagesBody) -> recipe.ConversationRequest:
    """An answer that a last assistant message has begun is continued, as Anthropic documents it without thinking.

    The recipe takes such a message for history.
    """
    messages = conversion.conversation.messages
    last = messages[-1] if messages else None
    if (
        last is None
        or last.role != "assistant"
        or last.tool_calls
        or not last.content
        or conversion.conversation.thinking_mode
    ):
        return conversion
    old = conversion.conversation
    conversation = recipe.Conversation(
        [*messages[:-1], recipe.AssistantMessage(last.content, None, None, True)],
        thinking_mode=False,
        tools=old.tools,
        tool_choice=old.tool_choice,
    )
    return recipe.ConversationRequest(conversation, conversion.model_version)
