"""The conformance cases of the API run through the real router: what the model says, how it is cut, what comes out.

A case says what the model outputs as text with markers. It is run in three cuts, streamed and not: all at once, one
token a chunk, one byte a chunk (every token that is no marker replaced by those of its bytes). All six must agree.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from epdserve.services.router.app import create_app
from epdserve.services.router.config import RouterConfig
from support.fake_cluster import FakeCluster, Script
from support.real_tokenizer import real_tokenizer

BAR = "\N{FULLWIDTH VERTICAL LINE}"
USER = [{"role": "user", "content": "x"}]
OFF = {"thinking": {"type": "disabled"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "does it",
        "parameters": {
            "type": "object",
            "properties": {"p": {"type": "string"}, "q": {"type": "integer"}},
        },
    },
}
CUTS = ("whole", "token", "byte")


def dsml(text: str) -> str:
    """``<D calls>`` and friends with the real marker for D."""
    return text.replace("</D ", f"</{BAR}DSML{BAR} ").replace("<D ", f"<{BAR}DSML{BAR} ")


def parameter(name: str, value: str, *, string: str | None = "true") -> str:
    """A parameter with its tags; ``string`` None leaves the attribute out."""
    attribute = "" if string is None else f' string="{string}"'
    return dsml(f'<D parameter name="{name}"{attribute}>') + value + dsml("</D parameter>\n")


def invoke(name: str, *parameters: str) -> str:
    """One call."""
    return dsml(f'<D invoke name="{name}">\n') + "".join(parameters) + dsml("</D invoke>\n")


def block(*invokes: str) -> str:
    """A block of calls."""
    return dsml("<D calls>\n") + "".join(invokes) + dsml("</D calls>")


def spoken(*pieces: str) -> list[int]:
    """Ids of what the model says; the spelling of a marker is that marker."""
    return [token for piece in pieces for token in real_tokenizer().native.encode(piece)]


def typed(text: str) -> list[int]:
    """Ids of text that looks like a marker and is none."""
    return [token for character in text for token in real_tokenizer().plain_ids(character)]


def in_bytes(ids: Sequence[int]) -> list[int]:
    """The same text with one id a byte; markers stay what they are."""
    vocabulary = real_tokenizer().vocabulary
    out: list[int] = []
    for token in ids:
        if vocabulary.is_marker(token):
            out.append(token)
        else:
            out += [vocabulary.byte_ids[byte] for byte in vocabulary.bytes_of(token)]
    return out


@dataclass
class Outcome:
    """What a client has at the end; ids of calls are checked and left out."""

    content: str = ""
    reasoning: str | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str | None = None

    @property
    def arguments(self) -> list[Any]:
        """Decoded arguments of the calls."""
        return [json.loads(arguments) for _, arguments in self.calls]


class Bench:
    """The real router with a model that says what it is told to."""

    def __init__(self, http: httpx.AsyncClient, cluster: FakeCluster) -> None:
        self.http = http
        self.cluster = cluster

    async def post(self, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
        """One request; model and messages may be left out."""
        return await self.http.post(path, json={"model": "demo", "messages": USER, **fields})

    async def outcome(self, output: Sequence[int], cut: str, **fields: Any) -> Outcome:
        """What one request gets for one cut of the output."""
        ids = in_bytes(output) if cut == "byte" else list(output)
        script = self.cluster.script
        script.ids, script.batch = ids, max(1, len(ids) + 1) if cut == "whole" else 1
        response = await self.post(**fields)
        assert response.status_code == 200, response.text
        return _of_stream(response.text) if fields.get("stream") else _of_answer(response.json())

    async def run(self, output: Sequence[int], **fields: Any) -> Outcome:
        """What a request gets, the same in all cuts, streamed and not."""
        outcomes = {
            (cut, stream): await self.outcome(output, cut, stream=stream, **fields)
            for cut in CUTS
            for stream in (False, True)
        }
        first = outcomes["whole", False]
        for how, outcome in outcomes.items():
            assert outcome == first, how
        return first

    async def metric(self, name: str) -> float:
        """A sample of the router's metrics, 0 if there is none."""
        text = (await self.http.get("/metrics")).text
        return next((float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " ")), 0)

    @property
    def prompt(self) -> list[int]:
        """Ids of the last prompt."""
        ids: list[int] = self.cluster.prefill_jobs[-1][1].tokens.tolist()
        return ids


@asynccontextmanager
async def bench(script: Script | None = None, **settings: Any) -> AsyncIterator[Bench]:
    """A router with these settings, its lifespan running."""
    cluster = FakeCluster(script or Script())
    config = RouterConfig(model_dir=Path("unused"), model_name="demo", **settings)
    app = create_app(config, cluster, tokenizer=real_tokenizer())
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router") as http,
    ):
        yield Bench(http, cluster)


def chunks_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream that ends as it should."""
    assert text.endswith("data: [DONE]\n\n")
    assert text.count("[DONE]") == 1
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def _of_stream(text: str) -> Outcome:
    outcome = Outcome()
    seen_ids: set[str] = set()
    for chunk in chunks_of(text):
        for choice in chunk["choices"]:
            assert outcome.finish is None, "text after the finish reason"
            delta = choice["delta"]
            outcome.content += delta.get("content") or ""
            if delta.get("reasoning_content") is not None:
                outcome.reasoning = (outcome.reasoning or "") + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                _take_call(call, outcome, seen_ids)
            outcome.finish = choice["finish_reason"]
    return outcome


def _take_call(call: dict[str, Any], outcome: Outcome, seen_ids: set[str]) -> None:
    function = call["function"]
    if "id" in call:
        assert call["index"] == len(outcome.calls)
        assert (call["type"], function["arguments"]) == ("function", "")
        assert call["id"] not in seen_ids
        seen_ids.add(call["id"])
        outcome.calls.append((function["name"], ""))
        return
    assert call.keys() == {"index", "function"}
    assert function.keys() == {"arguments"}
    assert call["index"] == len(outcome.calls) - 1
    name, arguments = outcome.calls[-1]
    outcome.calls[-1] = (name, arguments + function["arguments"])


def _of_answer(answer: dict[str, Any]) -> Outcome:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = message.get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return Outcome(
        message["content"] or "",
        message.get("reasoning_content"),
        [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        choice["finish_reason"],
    )
