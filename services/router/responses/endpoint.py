"""The Responses endpoint."""

from __future__ import annotations

import time

from epdserve.services.router.conversation import ConversationEndpoint, Read
from epdserve.services.router.fields import parse_body, parse_json
from epdserve.services.router.grants import Granting
from epdserve.services.router.request import GenerateRequest
from epdserve.services.router.responses.body import ResponsesBody
from epdserve.services.router.responses.prepare import prepare
from epdserve.services.router.responses.shape import ResponsesShape


class ResponsesEndpoint(ConversationEndpoint):
    """``POST /v1/responses``."""

    def read(self, raw: bytes, granting: Granting) -> Read:
        """Check and render; see ``ConversationEndpoint``."""
        body = parse_body(ResponsesBody, parse_json(raw, self.parts.body_limits))
        prepared, echo = prepare(body, self.parts)

        def shape(request: GenerateRequest) -> ResponsesShape:
            return ResponsesShape("resp_" + request.request_id, echo, int(time.time()))

        return Read(prepared, body.unknown, shape, "tools" if prepared.answer_format.free else "text")
