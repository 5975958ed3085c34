"""From the bytes of a chat request to a generation: parse, check, render, decide the limits."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, Final

import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.auth import tenant_key
from epdserve.services.router.effort import resolve_effort
from epdserve.services.router.http_errors import ContextTooLong, unknown_model
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.rendering import ChatPrompt, RenderedChat
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.schemas import ChatBody, parse_chat_body, unknown_fields
from epdserve.services.types import Effort, SamplingParams

# Below this, parsing and rendering cost less than the way to a thread and back
_IN_THREAD_ABOVE_BYTES: Final = 32 * 1024
# Above this, few at a time: encoding takes a core, and some 250 times its bytes in memory
_HEAVY_ABOVE_BYTES: Final = 128 * 1024


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat request that may run."""

    body: ChatBody
    chat: RenderedChat
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how the request is called on other processes."""

    request_id: str
    key_name: str
    trace: str


async def prepare_chat(raw: bytes, parts: RouterParts, caller: Caller) -> ChatCall:
    """A checked and rendered request. Long ones are worked on in a thread; the tokenizer leaves the lock free.

    Raises:
        InvalidRequest, ModelNotFound: As the message says; ``param`` names the field.
    """
    if len(raw) > _HEAVY_ABOVE_BYTES:
        async with parts.heavy_renders:
            body, chat = await asyncio.to_thread(_parse_and_render, raw, parts)
    elif len(raw) > _IN_THREAD_ABOVE_BYTES:
        body, chat = await asyncio.to_thread(_parse_and_render, raw, parts)
    else:
        body, chat = _parse_and_render(raw, parts)
    if unknown := unknown_fields(body):
        parts.metrics.unknown_fields.inc(unknown)
    loop = asyncio.get_running_loop()
    deadline_s = min(body.deadline_s or parts.config.request_deadline_s, parts.config.request_deadline_s)
    key = tenant_key(
        parts.config.isolation,
        key_name=caller.key_name,
        user=body.user_id or body.user or "",
        cache_salt=body.cache_salt or "",
    )
    request = GenerateRequest(
        request_id=caller.request_id,
        tokens=chat.tokens,
        tenant_key=key,
        sampling=_sampling(body, chat, parts),
        deadline_at=loop.time() + deadline_s,
        exact=bool(body.exact),
        effort=chat.effort,
        trace=caller.trace,
    )
    return ChatCall(body, chat, request)


def _parse_and_render(raw: bytes, parts: RouterParts) -> tuple[ChatBody, RenderedChat]:
    body = parse_chat_body(_json(raw))
    if body.model not in parts.model_names:
        raise unknown_model(body.model, parts.model_names)
    effort = resolve_effort(
        thinking=body.thinking_switch,
        effort=body.asked_effort,
        default_thinking=parts.config.default_thinking,
    )
    prompt = ChatPrompt(body.messages, effort, body.tools or (), body.tool_choice, None, body.stops)
    return body, parts.renderer.render(prompt, max_tokens=_context_tokens(parts))


def _json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        # orjson's message names a reason and a place, never the content
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def _sampling(body: ChatBody, chat: RenderedChat, parts: RouterParts) -> SamplingParams:
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    if parts.config.official_sampling:
        temperature, top_p = _official(temperature, top_p, chat.effort)
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return SamplingParams(
        # The wire carries int64; the upper half of the unsigned range is its negative half
        seed=seed - 2**64 if seed >= 2**63 else seed,
        max_tokens=_max_tokens(body, len(chat.tokens), parts),
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
    )


def _official(temperature: float, top_p: float, effort: Effort | None) -> tuple[float, float]:
    """What DeepSeek's service makes of temperature and top_p (spec 6.2)."""
    if effort is None:
        return temperature, 1.0
    return 1.0, max(0.95, top_p)


def _max_tokens(body: ChatBody, prompt_tokens: int, parts: RouterParts) -> int:
    """Tokens the answer may take: what was asked for, else the rest of the context, capped if a cap is set."""
    context = _context_tokens(parts)
    asked = body.completion_limit
    room = context - prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        wish = "" if asked is None else f" and max_tokens {asked}"
        message = f"the context holds {context} tokens: {prompt_tokens} in the messages{wish} do not fit"
        raise ContextTooLong(message, param="messages" if room < 1 else "max_tokens")
    if asked is not None:
        return asked
    return min(room, parts.config.max_completion_tokens or room)


def _context_tokens(parts: RouterParts) -> int:
    """Tokens of prompt and answer together: the setting's, or what the workers hold if that is less."""
    served = parts.placer.max_context_tokens()
    context = parts.config.max_context_tokens
    return context if served is None else min(context, served)
