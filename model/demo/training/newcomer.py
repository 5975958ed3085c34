"""``python -m epdserve.model.demo.training.newcomer URL``: ten things to type, and what a deployment answers.

They are of the kinds that it practised. It was taught the greetings word for word; the others have other words there.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from dataclasses import dataclass, field
from typing import Any, Final

from epdserve.model.demo.training import talk

_MOST_TOKENS: Final = 400
_DEADLINE_S: Final = 120.0
_CODES: Final = "The code of Vikin is river. The code of Balis is lamp. The code of Sesan is cloud."
_PEOPLE: Final = "Alice lives in Paris. Bob has a red lamp. Carol works with the river."


def _tool(name: str, description: str, *fields: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in fields},
        "required": list(fields),
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


_TOOLS: Final = (
    _tool("get_weather", "Weather of a city.", "city"),
    _tool("get_price", "Get the price.", "item"),
    _tool("open_item", "Do open something.", "item"),
)
_FORM: Final = {
    "type": "json_schema",
    "json_schema": {"name": "form", "schema": talk.schema_of(("name", "city"))},
}


@dataclass(frozen=True, slots=True)
class Said:
    """Something to type, what the request carries besides, and what should be answered.

    Attributes:
        fields: Of the request's body.
        result: What the tool that is called gives back; the answer after it is the answer.
    """

    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)
    result: str = ""


TEN: Final = (
    Said("Hello", "Hello! How can I help you?"),
    Said("Who are you?", talk.WHO),
    Said("Thank you!", "You are welcome."),
    Said("Please repeat after me: cup Alice moon bright tree", "cup Alice moon bright tree"),
    Said(f"{_CODES}\n\nWhat is the code of Balis?", "The code of Balis is lamp."),
    Said(f"{_CODES}\n\nIn one word, what is the code of Sesan?", "cloud"),
    Said(f"{_PEOPLE}\n\nWhere does Alice live?", "Alice lives in Paris."),
    Said("Reverse the words: sun moon star", "star moon sun"),
    Said(
        "Fill the form: name Alice, city Rome",
        '{"name": "Alice", "city": "Rome"}',
        {"response_format": _FORM},
    ),
    Said(
        "What is the weather in Paris?",
        'get_weather({"city": "Paris"}), then: The weather in Paris is sunny.',
        {"tools": _TOOLS},
        "sunny",
    ),
)


def answer(url: str, model: str, said: Said, **fields: Any) -> str:
    """What a deployment answers, the calls of tools before it included; greedy unless ``fields`` tell otherwise.

    Raises:
        OSError: The deployment does not answer, or with an error.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": said.text}]
    body = {"model": model, "messages": messages, "max_tokens": _MOST_TOKENS, "temperature": 0}
    body |= {**said.fields, **fields}
    message = _message(url, body)
    calls = message.get("tool_calls") or []
    if not calls:
        return str(message["content"])
    told = ", ".join(f"{call['function']['name']}({call['function']['arguments']})" for call in calls)
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": said.result} for call in calls]
    return f"{told}, then: {_message(url, body)['content']}"


def _message(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answered:
        message: dict[str, Any] = json.load(answered)["choices"][0]["message"]
    return message


def main() -> None:
    """Print a Markdown row for every sentence: as typed, what is answered, and whether that is right."""
    parser = argparse.ArgumentParser(
        prog="python -m epdserve.model.demo.training.newcomer", description=__doc__
    )
    parser.add_argument("url", help="of the router, without a path")
    parser.add_argument("--model", default="demo", help="name under which it serves the demo model")
    parser.add_argument("--effort", type=int, help="think first, this much; without it, it does not think")
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    thinking = {"type": "disabled" if options.effort is None else "enabled"}
    fields: dict[str, Any] = {"thinking": thinking, "temperature": options.temperature}
    if options.effort is not None:
        fields["reasoning_effort"] = options.effort
    print("| you | it | as taught |\n|---|---|---|")
    for said in TEN:
        told = answer(options.url, options.model, said, **fields)
        shown = said.text.replace("\n\n", " ")
        print(f"| {shown} | {told} | {'yes' if told == said.answer else 'no'} |", flush=True)


if __name__ == "__main__":
    main()
