"""The chat endpoint: bodies in, chunks or one answer out, in one dialect."""

from __future__ import annotations

import time

from epdserve.services.router.conversation import ConversationEndpoint, Prepared, Read
from epdserve.services.router.fields import parse_body, parse_json
from epdserve.services.router.grants import Granting
from epdserve.services.router.openai_chat.body import ChatBody
from epdserve.services.router.openai_chat.prepare import prepare
from epdserve.services.router.openai_chat.shape import ChatHead, ChatShape, Dialect
from epdserve.services.router.parts import RouterParts
from epdserve.services.router.prompt_logprobs import PromptTold
from epdserve.services.router.request import GenerateRequest


class ChatEndpoint(ConversationEndpoint):
    """Chat completions in one dialect."""

    def __init__(self, parts: RouterParts, dialect: Dialect) -> None:
        super().__init__(parts)
        self._dialect = dialect

    def read(self, raw: bytes, granting: Granting) -> Read:
        """Check and render; see ``ConversationEndpoint``."""
        body = parse_body(ChatBody, parse_json(raw, self.parts.body_limits))
        prepared = prepare(body, self.parts, granting)
        asks_for = "tools" if prepared.answer_format.free else "response_format"
        return Read(prepared, body.unknown, lambda request: self._shape(body, prepared, request), asks_for)

    def _shape(self, body: ChatBody, prepared: Prepared, request: GenerateRequest) -> ChatShape:
        head = ChatHead(
            answer_id="chatcmpl-" + request.request_id,
            model=body.model,
            created=int(time.time()),
            choices=prepared.options.n,
            thinking=prepared.chat.effort is not None,
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )
        told = None
        if prepared.options.prompt_logprobs is not None:
            told = PromptTold([request.tokens], self.parts.tokenizer.vocabulary)
        return ChatShape(head, self._dialect, told)
