"""Tools to declare, requests that need one of them, calls in DSML, results and what is said about them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Final

from epdserve.model.demo import corpus

_WEATHER: Final = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
_ASKED: Final = ("price", "color", "owner", "number", "record", "history", "name", "score", "weight", "speed")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as declared, and how one asks for it."""

    declared: dict[str, Any]
    kind: str
    topic: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request, the call that answers it, a result, and the words about the result."""

    question: str
    tool: Tool
    arguments: dict[str, str | int]
    result: str
    answer: str


def draw_tools(draw: random.Random) -> list[Tool]:
    """One to four different tools."""
    count = draw.choice((1, 1, 2, 2, 3, 4))
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        tool = draw_tool(draw)
        tools[tool.declared["name"]] = tool
    return list(tools.values())


def draw_tool(draw: random.Random) -> Tool:
    """Any one tool."""
    kind = draw.choice(("weather", "ask", "ask", "do", "order"))
    if kind == "weather":
        return Tool(_declare("get_weather", "Weather of a city.", {"city": "string"}), kind, "weather")
    if kind == "ask":
        topic = draw.choice(_ASKED)
        return Tool(_declare(f"get_{topic}", f"Get the {topic}.", {"item": "string"}), kind, topic)
    if kind == "do":
        verb = draw.choice(("open", "close", "start", "stop", "find", "clean", "check", "show"))
        return Tool(_declare(f"{verb}_item", f"Do {verb} something.", {"item": "string"}), kind, verb)
    noun = draw.choice(("book", "ticket", "apple", "cup", "chair", "bottle"))
    fields = {"name": "string", "count": "integer"}
    return Tool(_declare(f"order_{noun}", f"Order a {noun}.", fields), kind, noun)


def _declare(name: str, description: str, fields: dict[str, str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {field: {"type": kind} for field, kind in fields.items()},
        "required": list(fields),
    }
    return {"name": name, "description": description, "parameters": parameters}


def draw_request(draw: random.Random, tool: Tool) -> Request:
    """Something that only this tool can do."""
    topic = tool.topic
    if tool.kind == "weather":
        place, sky = draw.choice(corpus.PLACES), draw.choice(_WEATHER)
        asked = draw.choice(("What is the weather in {}?", "How is the weather in {}?")).format(place)
        return Request(asked, tool, {"city": place}, sky, f"The weather in {place} is {sky}.")
    if tool.kind == "ask":
        item, found = draw.sample(corpus.NOUNS, 2)
        asked = draw.choice(("What is the {} of the {}?", "Tell me the {} of the {}.")).format(topic, item)
        return Request(asked, tool, {"item": item}, found, f"The {topic} of the {item} is {found}.")
    if tool.kind == "do":
        item = draw.choice(corpus.NOUNS)
        asked = draw.choice(("Please {} the {}.", "Can you {} the {}?")).format(topic, item)
        return Request(asked, tool, {"item": item}, "done", f"I did {topic} the {item}.")
    person, count = draw.choice((*corpus.PEOPLE, *corpus.names())), draw.randint(2, 99)
    asked = f"Order {count} {topic} for {person}."
    return Request(
        asked, tool, {"name": person, "count": count}, "ok", f"I ordered {count} {topic} for {person}."
    )


def thoughts(request: Request) -> tuple[str, str]:
    """What one thinks first and last before a call."""
    name = request.tool.declared["name"]
    return f"The user asks for {name}.", f"I call {name}."


def call_text(request: Request, marker: str) -> str:
    """The DSML block of a call; ``marker`` stands for the DSML marker."""
    lines = [f"<{marker} calls>", f'<{marker} invoke name="{request.tool.declared["name"]}">']
    for field, value in request.arguments.items():
        plain = isinstance(value, str)
        text = value if plain else json.dumps(value)
        lines.append(
            f'<{marker} parameter name="{field}" string="{json.dumps(plain)}">{text}</{marker} parameter>'
        )
    return "\n".join([*lines, f"</{marker} invoke>", f"</{marker} calls>"])
