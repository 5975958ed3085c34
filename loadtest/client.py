"""One streamed chat request, with the time at which each event arrived.

Times are of one monotonic clock, in seconds. The client adds its own cost to every figure it reports: it
shares the cores with the server when both run on one machine, and figures say so.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Outcome:
    """What came back for one request.

    ``text_at`` holds the arrival time of every event that carried text or a piece of a call; one event may carry
    several tokens, so the number of tokens comes from the server's usage. ``text`` is reasoning and content.
    """

    sent_at: float
    text_at: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    status: int = 0
    text: str = ""
    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def ok(self) -> bool:
        """The stream ended as a stream should."""
        return self.error is None and self.finish_reason is not None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text, if any came."""
        return self.text_at[0] - self.sent_at if self.text_at else None

    @property
    def prompt_tokens(self) -> int:
        """Length of the rendered prompt, as the server counts it."""
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens, as the server counts them."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def itl_s(self) -> float | None:
        """Mean time between tokens after the first one."""
        if len(self.text_at) < 2 or self.completion_tokens < 2:
            return None
        return (self.text_at[-1] - self.text_at[0]) / (self.completion_tokens - 1)


def new_client(url: str, *, api_key: str | None, silence_s: float, connections: int) -> httpx.AsyncClient:
    """A client for ``url``.

    Args:
        url: Base address, without ``/v1``.
        api_key: Bearer token, if the server wants one.
        silence_s: Longest accepted silence inside an answer.
        connections: Most connections at a time.
    """
    return httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(silence_s, connect=CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,
        verify=url.startswith(
            "https"
        ),  # authorities take 20 ms to read, and a client a request is usual here
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """Name of the first model that the server lists."""
    answer = await client.get("/v1/models")
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


async def stream_chat(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    outcome: Outcome | None = None,
    *,
    receipt: bool = True,
    headers: Mapping[str, str] | None = None,
) -> Outcome:
    """Send one request and read its stream to the end. Failures are outcomes, not exceptions.

    Args:
        client: From ``new_client``.
        body: Of the request.
        outcome: Filled as events arrive, for callers that look at it before the end.
        receipt: Ask for this server's receipt; another server may refuse a field that it does not know.
        headers: Beside the client's own.
    """
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    if receipt:
        asked["receipt"] = True
    outcome = outcome or Outcome(sent_at=time.monotonic())
    try:
        async with client.stream("POST", "/v1/chat/completions", json=asked, headers=headers) as answer:
            outcome.status = answer.status_code
            if answer.status_code != httpx.codes.OK:
                outcome.error = f"{answer.status_code}: {(await answer.aread())[:200]!r}"
            else:
                await _read(answer, outcome)
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.ended_at = time.monotonic()
    return outcome


async def _read(answer: httpx.Response, outcome: Outcome) -> None:
    pieces = _Pieces([], [])
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        _take(json.loads(data), outcome, pieces)
    outcome.reasoning, outcome.content = "".join(pieces.reasoning), "".join(pieces.content)
    outcome.text = outcome.reasoning + outcome.content


def _take(event: dict[str, Any], outcome: Outcome, pieces: "_Pieces") -> None:
    if error := event.get("error"):
        outcome.error = str(error.get("message", error))
    if usage := event.get("usage"):
        outcome.usage = usage
    if receipt := event.get("epdserve"):
        outcome.receipt = receipt
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        content, calls = delta.get("content") or "", delta.get("tool_calls") or ()
        if reasoning or content or calls:
            outcome.text_at.append(time.monotonic())
            pieces.reasoning.append(reasoning)
            pieces.content.append(content)
        for call in calls:
            _take_call(call, outcome.tool_calls)
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason


def _take_call(piece: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    """A call comes in pieces: its name first, then its arguments bit by bit."""
    while len(calls) <= int(piece.get("index", 0)):
        calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call, function = calls[int(piece.get("index", 0))], piece.get("function") or {}
    call["id"] = piece.get("id") or call["id"]
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


@dataclass(frozen=True, slots=True)
class _Pieces:
    reasoning: list[str]
    content: list[str]
