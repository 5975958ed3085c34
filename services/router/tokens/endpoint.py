"""The endpoints that turn text into ids and back, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from epdserve.services.errors import InvalidRequest
from epdserve.services.router.conversation import off_the_loop, show_images
from epdserve.services.router.endpoint import Endpoint
from epdserve.services.router.exchange import Exchange
from epdserve.services.router.fields import Body, TokenId, parse_body, parse_json
from epdserve.services.router.grants import Granting
from epdserve.services.router.http_errors import unknown_model
from epdserve.services.router.openai_chat.body import ChatBody
from epdserve.services.router.openai_chat.prepare import prepare
from epdserve.services.router.options import Caller, context_tokens
from epdserve.services.router.rendering import RenderedChat
from epdserve.services.router.request import Trail
from pydantic import Field, StrictBool, StrictStr


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt, or a conversation as chat takes it."""

    prompt: StrictStr | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: StrictBool | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    tokens: Annotated[list[TokenId], Field(max_length=2**20)]


class TokenizeEndpoint(Endpoint):
    """Text or a conversation to ids; conversations go through the chat endpoint's own renderer."""

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller, trail: Trail) -> None:
        """Encode and answer."""
        body, found = await off_the_loop(self.parts, len(raw), lambda: self._encoded(raw))
        if isinstance(found, RenderedChat):
            chat, _ = await show_images(found, self.parts)
            found = chat.tokens.tolist()
        await exchange.answer(200, self._told(body, found))

    def _encoded(self, raw: bytes) -> tuple[TokenizeBody, RenderedChat | list[int]]:
        parts = self.parts
        value = with_model(parse_json(raw, parts.body_limits), parts.config.model_name)
        body = parse_body(TokenizeBody, value)
        if body.model not in parts.model_names:
            raise unknown_model(body.model, parts.model_names)
        if (body.prompt is None) is (body.messages is None):
            raise InvalidRequest("either prompt or messages must be given", param="prompt")
        if body.prompt is not None:
            return body, parts.tokenizer.native.encode(body.prompt)
        return body, prepare(parse_body(ChatBody, value), parts, Granting(parts.grants, "")).chat

    def _told(self, body: TokenizeBody, ids: list[int]) -> bytes:
        parts = self.parts
        fields: dict[str, Any] = {"count": len(ids), "max_model_len": context_tokens(parts), "tokens": ids}
        if body.return_token_strs:
            fields["token_strs"] = [parts.tokenizer.vocabulary.name_of(token) for token in ids]
        return orjson.dumps(fields)


class DetokenizeEndpoint(Endpoint):
    """Ids to text."""

    async def handle(self, exchange: Exchange, raw: bytes, caller: Caller, trail: Trail) -> None:
        """Decode and answer."""
        await exchange.answer(200, await off_the_loop(self.parts, len(raw), lambda: self._decoded(raw)))

    def _decoded(self, raw: bytes) -> bytes:
        parts = self.parts
        body = parse_body(
            DetokenizeBody, with_model(parse_json(raw, parts.body_limits), parts.config.model_name)
        )
        if body.model not in parts.model_names:
            raise unknown_model(body.model, parts.model_names)
        parts.tokenizer.vocabulary.check(body.tokens, param="tokens")
        return orjson.dumps({"prompt": parts.tokenizer.vocabulary.text_of(body.tokens)})


def with_model(value: object, name: str) -> object:
    """A body that may leave out the model."""
    return {"model": name, **value} if isinstance(value, dict) else value
