"""The recipe's own writers of answers, as an oracle for ours."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe
import orjson
from support.real_tokenizer import real_tokenizer

OPTIONS = recipe.ConversionOptions().with_model_alias("demo", recipe.ModelVersion.DeepseekV41Flash)


def oracle_events(
    kind: Any, body: dict[str, Any], ids: Sequence[int], *, length: bool, usage: tuple[int, int]
) -> list[dict[str, Any]]:
    """Events of the recipe's writer, the ids pushed one by one; usage is (prompt, cached)."""
    raw = orjson.dumps(body)
    conversion = kind(raw).convert(OPTIONS)
    generator = kind.chunk_generator(conversion, "ID", body["model"])
    if kind is recipe.ResponsesRequest:
        request = kind(raw)
        generator = generator.with_namespace_tool_map(request.namespace_tool_map(OPTIONS))
        generator = generator.with_echo(kind(raw).echo())
    processor = recipe.StreamProcessor(generator, conversion.parsing_options, real_tokenizer().native)
    counts = recipe.PromptUsage(prompt_tokens=usage[0], prompt_cache_hit_tokens=usage[1])
    events = processor.push(recipe.InferenceChunk.ready(prompt_usage=counts))
    for token in ids:
        if not processor.finished:
            events += processor.push(recipe.InferenceChunk.tokens([token]))
    if not processor.finished:
        reason = recipe.InferenceFinishReason.Length if length else recipe.InferenceFinishReason.Stop
        events += processor.push(recipe.InferenceChunk.finish(reason))
    return [json.loads(event.to_json()) for event in events]


def sse(text: str) -> list[dict[str, Any]]:
    """Events of a stream that names them; the name must be the event's type."""
    events = []
    for chunk in text.split("\n\n")[:-1]:
        name, _, data = chunk.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def without_names(value: Any) -> Any:
    """The value with ids of requests and calls, and times, made equal."""
    text = json.dumps(value)
    text = re.sub(r"(?:msg|resp)_[0-9a-f]{32}", "ID", text)
    text = re.sub(r"call_(\d\d)_\w+", r"call_\1", text)
    text = re.sub(r'"(created_at|completed_at)": \d+', r'"\1": 0', text)
    return json.loads(text)
