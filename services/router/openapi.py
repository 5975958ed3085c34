"""The description of the API at ``/openapi.json``: what FastAPI serves and what goes past it, in one document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from epdserve.services.router.anthropic.body import MessagesBody
from epdserve.services.router.fields import Body
from epdserve.services.router.openai_chat.body import ChatBody
from epdserve.services.router.openai_completions.body import CompletionBody
from epdserve.services.router.openapi_answers import ANSWERS, MESSAGE
from epdserve.services.router.responses.body import ResponsesBody
from epdserve.services.router.tokens.endpoint import DetokenizeBody, TokenizeBody
from pydantic.json_schema import models_json_schema

_REF: Final = "#/components/schemas/"
_BODIES: Final[tuple[type[Body], ...]] = (
    ChatBody,
    CompletionBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
    DetokenizeBody,
)

# Path: body, schema of a whole answer, whether it streams, and one line about it
_POSTS: Final[dict[str, tuple[type[Body], str, bool, str]]] = {
    "/v1/chat/completions": (ChatBody, "ChatAnswer", True, "Chat, in OpenAI's shape"),
    "/chat/completions": (ChatBody, "ChatAnswer", True, "Chat, in DeepSeek's own shape"),
    "/beta/chat/completions": (ChatBody, "ChatAnswer", True, "Chat, in DeepSeek's own shape"),
    "/v1/completions": (CompletionBody, "CompletionAnswer", True, "Raw completions, FIM with a suffix"),
    "/completions": (CompletionBody, "CompletionAnswer", True, "Raw completions, usage in the last chunk"),
    "/beta/completions": (
        CompletionBody,
        "CompletionAnswer",
        True,
        "Raw completions, usage in the last chunk",
    ),
    "/v1/messages": (MessagesBody, "MessageAnswer", True, "Anthropic's Messages"),
    "/anthropic/v1/messages": (MessagesBody, "MessageAnswer", True, "Anthropic's Messages"),
    "/v1/messages/count_tokens": (MessagesBody, "CountAnswer", False, "Tokens a message would take"),
    "/anthropic/v1/messages/count_tokens": (
        MessagesBody,
        "CountAnswer",
        False,
        "Tokens a message would take",
    ),
    "/v1/responses": (ResponsesBody, "ResponseAnswer", True, "Responses, without state"),
    "/responses": (ResponsesBody, "ResponseAnswer", True, "Responses, without state"),
    "/tokenize": (TokenizeBody, "TokenizeAnswer", False, "Ids of a text or a conversation"),
    "/v1/tokenize": (TokenizeBody, "TokenizeAnswer", False, "Ids of a text or a conversation"),
    "/detokenize": (DetokenizeBody, "DetokenizeAnswer", False, "Text of ids"),
    "/v1/detokenize": (DetokenizeBody, "DetokenizeAnswer", False, "Text of ids"),
}
_FAILURES: Final = {
    "400": "The request cannot be served as it is",
    "401": "No API key, or none that is known here",
    "404": "No such model",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "415": "The body is compressed",
    "429": "No room now; retry-after says when",
    "500": "A fault of the server",
    "503": "No worker can take it now",
    "504": "The deadline passed",
}


def describe(document: dict[str, Any]) -> dict[str, Any]:
    """Add to FastAPI's own document what goes past it, and the errors that every path may answer with."""
    _, described = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=_REF + "{model}"
    )
    schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(described["$defs"])
    schemas.update(ANSWERS)
    schemas["ChatBody"]["properties"]["messages"]["items"] = MESSAGE
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    # Keys are wanted only if the server has a file of them
    document["security"] = [{}, {"bearer": []}, {"key": []}]
    paths: dict[str, Any] = document.setdefault("paths", {})
    for path, (body, answer, streams, line) in _POSTS.items():
        paths[path] = {"post": _operation(path, body.__name__, answer, streams=streams, line=line)}
    for operations in paths.values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"].setdefault("401", _failure("Error", _FAILURES["401"]))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def _operation(path: str, body: str, answer: str, *, streams: bool, line: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF + answer}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = "AnthropicError" if is_anthropic(path) else "Error"
    return {
        "summary": line,
        "operationId": path.strip("/").replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF + body}}},
        },
        "responses": {
            "200": {
                "description": "The answer" + (", whole or as a stream" if streams else ""),
                "content": content,
            },
            **{status: _failure(error, words) for status, words in _FAILURES.items()},
        },
    }


def _failure(schema: str, words: str) -> Mapping[str, Any]:
    return {"description": words, "content": {"application/json": {"schema": {"$ref": _REF + schema}}}}


def is_anthropic(path: str) -> bool:
    """Whether errors of this path have Anthropic's shape."""
    return path.startswith(("/anthropic/", "/v1/messages"))
