"""Schemas of answers for the description of the API. Objects may hold more than is listed: clients skip what they do
not know, and DeepSeek's shape has keys that OpenAI's lacks."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]


def _object(required: Schema, **optional: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _only(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_STRING: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_NUMBER: Final = {"type": "number"}
_ANY_OBJECT: Final = {"type": "object"}
_REASON: Final = _or_null(_only("stop", "length", "tool_calls", "content_filter"))

_USAGE: Final = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "prompt_cache_hit_tokens": _COUNT,
        "prompt_cache_miss_tokens": _COUNT,
    },
    completion_tokens_details=_object({"reasoning_tokens": _COUNT}),
)
_CALL: Final = _object(
    {
        "id": _STRING,
        "type": _only("function"),
        "function": _object({"name": _STRING, "arguments": _STRING}),
    },
    index=_COUNT,
)
_LOGPROB: Final = _object(
    {"token": _STRING, "logprob": _NUMBER, "bytes": _list(_COUNT), "top_logprobs": _list(_ANY_OBJECT)}
)
_CHAT_CHOICE: Final = _object(
    {
        "index": _COUNT,
        "message": _object(
            {"role": _only("assistant"), "content": _or_null(_STRING)},
            reasoning_content=_STRING,
            reasoning=_STRING,
            tool_calls=_list(_CALL),
        ),
        "logprobs": _or_null(
            _object({}, content=_or_null(_list(_LOGPROB)), reasoning_content=_list(_LOGPROB))
        ),
        "finish_reason": _REASON,
    }
)
_TEXT_CHOICE: Final = _object(
    {"index": _COUNT, "text": _STRING, "logprobs": _or_null(_ANY_OBJECT), "finish_reason": _REASON}
)

MESSAGE: Final = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": _only("system", "developer", "user", "assistant", "tool", "latest_reminder"),
        "content": _or_null({"anyOf": [_STRING, _list(_object({"type": _only("text"), "text": _STRING}))]}),
        "reasoning_content": _or_null(_STRING),
        "reasoning": _or_null(_STRING),
        "tool_calls": _or_null(_list(_CALL)),
        "tool_call_id": _STRING,
        "prefix": {"type": "boolean"},
    },
}

ANSWERS: Final[dict[str, Schema]] = {
    "Error": _object(
        {"error": _object({"message": _STRING, "type": _STRING, "param": _or_null(_STRING), "code": _STRING})}
    ),
    "AnthropicError": _object(
        {
            "type": _only("error"),
            "error": _object({"type": _STRING, "message": _STRING}),
            "request_id": _STRING,
        }
    ),
    "ChatAnswer": _object(
        {
            "id": _STRING,
            "object": _only("chat.completion"),
            "created": _COUNT,
            "model": _STRING,
            "choices": _list(_CHAT_CHOICE),
            "usage": _USAGE,
        },
        epdserve=_ANY_OBJECT,
        prompt_logprobs=_or_null(_list(_or_null(_ANY_OBJECT))),
    ),
    "CompletionAnswer": _object(
        {
            "id": _STRING,
            "object": _only("text_completion"),
            "created": _COUNT,
            "model": _STRING,
            "choices": _list(_TEXT_CHOICE),
            "usage": _USAGE,
        },
        epdserve=_ANY_OBJECT,
    ),
    "MessageAnswer": _object(
        {
            "id": _STRING,
            "type": _only("message"),
            "role": _only("assistant"),
            "model": _STRING,
            "content": _list(_object({"type": _only("thinking", "text", "tool_use")})),
            "stop_reason": _or_null(_only("end_turn", "max_tokens", "tool_use", "stop_sequence")),
            "stop_sequence": _or_null(_STRING),
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                }
            ),
        },
        epdserve=_ANY_OBJECT,
    ),
    "CountAnswer": _object({"input_tokens": _COUNT}),
    "ResponseAnswer": _object(
        {
            "id": _STRING,
            "object": _only("response"),
            "created_at": _COUNT,
            "status": _only("completed", "incomplete", "failed", "in_progress"),
            "model": _STRING,
            "output": _list(_object({"type": _STRING, "id": _STRING, "status": _STRING})),
            "usage": _or_null(
                _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT})
            ),
        },
        epdserve=_ANY_OBJECT,
    ),
    "TokenizeAnswer": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _list(_COUNT)}, token_strs=_list(_STRING)
    ),
    "DetokenizeAnswer": _object({"prompt": _STRING}),
}
