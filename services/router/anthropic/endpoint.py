"""The Messages endpoint, and the one that only counts."""

from __future__ import annotations

import orjson
from epdserve.services.router.anthropic.body import MessagesBody
from epdserve.services.router.anthropic.prepare import prepare
from epdserve.services.router.anthropic.shape import AnthropicErrors, MessageHead, MessagesShape
from epdserve.services.router.conversation import ConversationEndpoint, Read, off_the_loop, show_images
from epdserve.services.router.endpoint import Endpoint
from epdserve.services.router.exchange import Exchange
from epdserve.services.router.fields import parse_body, parse_json
from epdserve.services.router.grants import Granting
from epdserve.services.router.options import Caller
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.rendering import RenderedChat
from epdserve.services.router.request import GenerateRequest, Trail


class MessagesEndpoint(ConversationEndpoint):
    """``POST /v1/messages``."""

    def __init__(self, parts: RouterParts) -> None:
        super().__init__(parts, AnthropicErrors())

    def read(self, raw: bytes, granting: Granting) -> Read:
        """Check and render; see ``ConversationEndpoint``."""
        body = parse_body(MessagesBody, parse_json(raw, self.parts.body_limits))
        prepared = prepare(body, self.parts)
        thinking = prepared.chat.effort is not None

        def shape(request: GenerateRequest) -> MessagesShape:
            name = request.request_id
            return MessagesShape(MessageHead("msg_" + name, name, body.model, thinking))

        asks_for = "tools" if prepared.answer_format.free else "output_config"
        return Read(prepared, body.unknown, shape, asks_for)


class CountTokensEndpoint(Endpoint):
    """``POST /v1/messages/count_tokens``: what the same request would be counted as."""

    def __init__(self, parts: RouterParts) -> None:
        super().__init__(parts, AnthropicErrors())

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller, trail: Trail) -> None:
        """Render and count."""

        def render() -> RenderedChat:
            body = parse_body(MessagesBody, parse_json(raw, self.parts.body_limits))
            return prepare(body, self.parts).chat

        chat, _ = await show_images(await off_the_loop(self.parts, len(raw), render), self.parts)
        await exchange.answer(200, orjson.dumps({"input_tokens": len(chat.tokens)}))
