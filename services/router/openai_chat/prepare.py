"""From a checked chat body to something that may run: effort, tools, prompt, grammar. Runs in any thread."""

from __future__ import annotations

from epdserve.services.router.conversation import Prepared, expected_grammar
from epdserve.services.router.effort import resolve_effort
from epdserve.services.router.grants import Granting
from epdserve.services.router.http_errors import unknown_model
from epdserve.services.router.openai_chat.body import ChatBody
from epdserve.services.router.options import Thinking, check_choices, context_tokens
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.rendering import ChatPrompt
from epdserve.services.router.tools import plan_tools
from epdserve.services.types import Effort


def prepare(body: ChatBody, parts: RouterParts, granting: Granting) -> Prepared:
    """A checked and rendered chat.

    Raises:
        InvalidRequest, ModelNotFound: As the message says; ``param`` names the field.
    """
    if body.model not in parts.model_names:
        raise unknown_model(body.model, parts.model_names)
    config = parts.config
    options = body.options()
    check_choices(options.n, strict=config.strict_official)
    asked = resolve_effort(
        thinking=body.thinking_switch,
        effort=body.asked_effort,
        default_thinking=config.default_thinking,
        default_effort=config.default_effort,
    )
    effort, name, turn = granting.effort(body.messages, asked, body.effort_floor)
    floor = None if body.effort_floor is None else Effort(body.effort_floor)
    plan = plan_tools(
        body.declared(),
        body.wish(),
        thinking=effort is not None,
        strict_official=config.strict_official,
    )
    answer_format = body.answer_format()
    prompt = ChatPrompt(
        body.conversation(), effort, [dict(tool) for tool in plan.tools], plan.mode, answer_format
    )
    chat = parts.renderer.render(prompt, max_tokens=context_tokens(parts))
    return Prepared(
        options,
        chat,
        answer_format,
        expected_grammar(chat, plan, answer_format, parts.tokenizer),
        Thinking(effort, asked, floor, turn=turn, name=name),
    )
