"""``epdserve chat``: a terminal chat against a running server, over HTTP like any other client."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from epdserve.services.cli.chat_tools import Calls
from epdserve.services.cli.errors import CommandError
from rich.console import Console

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 120.0  # silence between two events, keep-alive comments included
HELP = "/new starts over, /effort N (low, high, max or 1-100) sets the effort, /quit or Ctrl-D leaves"


@dataclass(slots=True)
class ChatOptions:
    """What every turn of one chat sends along."""

    url: str
    model: str | None
    api_key: str | None
    effort: str | int | None
    thinking: bool
    temperature: float | None
    max_tokens: int | None
    system: str | None
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Turn:
    """What one answer consisted of. Times are seconds since the request was sent."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    receipt: dict[str, Any] | None = None
    first_at_s: float | None = None
    end_at_s: float = 0.0

    def message(self) -> dict[str, Any]:
        """The answer as history for the next turn."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.calls:
            message["tool_calls"] = self.calls.listed()
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        return message


def parse_effort(text: str) -> str | int:
    """``low``, ``high``, ``max`` or an integer, as the API takes it.

    Raises:
        CommandError: Something else.
    """
    if text.isdecimal() and 1 <= int(text) <= 100:
        return int(text)
    if text in ("low", "high", "max"):
        return text
    raise CommandError(f"effort is low, high, max or 1 to 100, not {text!r}")


def run(options: ChatOptions, message: str | None) -> None:
    """One answer to ``message``, or a conversation until end of input.

    Raises:
        CommandError: The server cannot be reached, or refuses a request.
    """
    console = Console(highlight=False, soft_wrap=True)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    # No proxy from the environment: the server is nearly always on this machine.
    with httpx.Client(base_url=options.url, timeout=timeout, headers=headers, trust_env=False) as client:
        chat = _Chat(client, options, console)
        if message is None and not sys.stdin.isatty():
            message = sys.stdin.buffer.read().decode(errors="replace")
        if message is not None:
            chat.ask(message)
        else:
            chat.converse()


class _Chat:
    def __init__(self, client: httpx.Client, options: ChatOptions, console: Console) -> None:
        self._client, self._options, self._console = client, options, console
        self._history: list[dict[str, Any]] = []
        self._model = options.model or self._first_model()
        self._start_over()

    def converse(self) -> None:
        self._console.print(f"[bold]{self._model}[/] at {self._options.url}; {HELP}", style="dim")
        while True:
            try:
                line = self._console.input("\n[bold cyan]you[/] ").strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line in ("/quit", "/exit"):
                return
            try:
                self._obey(line)
            except CommandError as error:
                self._console.print(f"[red]{error}[/]")

    def ask(self, message: str) -> None:
        """Send one user message, and where someone types, the results of the tools that are called."""
        before = len(self._history)
        turn = self._answered([{"role": "user", "content": typed(message)}])
        try:
            while turn.calls and sys.stdin.isatty():
                turn = self._answered([self._result(call) for call in turn.calls.listed()])
        except (EOFError, KeyboardInterrupt):  # a call without its result would be refused from now on
            del self._history[before:]

    def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        result = self._console.input(f"[bold cyan]result of {call['function']['name']}[/] ")
        return {"role": "tool", "tool_call_id": call["id"], "content": typed(result)}

    def _answered(self, messages: list[dict[str, Any]]) -> Turn:
        """The answer to these; on any failure the history is as it was before."""
        before = len(self._history)
        self._history += messages
        turn = Turn()
        try:
            self._stream(turn)
        except KeyboardInterrupt:
            self._console.print("\n[yellow]stopped[/]")
        except BaseException:
            del self._history[before:]
            raise
        self._history.append(turn.message())
        for line in turn.calls.lines():
            self._console.print(f"\ncalls {line}", style="bold", markup=False, end="")
        self._console.print(f"\n[dim]{receipt_line(turn)}[/]")
        return turn

    def _obey(self, line: str) -> None:
        if not line:
            return
        if line == "/new":
            self._start_over()
        elif line.startswith("/effort "):
            self._options.effort = parse_effort(line.removeprefix("/effort ").strip())
        elif line.startswith("/"):
            self._console.print(HELP, style="dim")
        else:
            self.ask(line)

    def _start_over(self) -> None:
        system = self._options.system
        self._history = [{"role": "system", "content": typed(system)}] if system else []

    def _first_model(self) -> str:
        try:
            answer = self._client.get("/v1/models")
            return str(_checked(answer).json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise _unreachable(self._options.url, error) from error

    def _body(self) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {
            "model": self._model,
            "messages": self._history,
            "stream": True,
            "stream_options": {"include_usage": True},
            "receipt": True,
            "reasoning_effort": options.effort,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "tools": options.tools or None,
        }
        if not options.thinking:
            body["thinking"] = {"type": "disabled"}
        return {name: value for name, value in body.items() if value is not None}

    def _stream(self, turn: Turn) -> None:
        started_at = time.monotonic()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=self._body()) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                for event in events(_checked(answer).iter_lines()):
                    self._take(turn, event, time.monotonic() - started_at)
        except httpx.HTTPError as error:
            raise _unreachable(self._options.url, error) from error
        turn.end_at_s = time.monotonic() - started_at

    def _take(self, turn: Turn, event: dict[str, Any], at_s: float) -> None:
        if "error" in event:
            raise CommandError(f"the server broke off: {event['error'].get('message')}")
        turn.usage = event.get("usage") or turn.usage
        turn.receipt = event.get("epdserve") or turn.receipt
        for choice in event.get("choices", ()):
            turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
            delta = choice.get("delta", {})
            for piece in delta.get("tool_calls") or ():
                turn.calls.take(piece)
            if text := delta.get("reasoning_content"):
                self._show(turn, turn.reasoning, text, at_s)
            if text := delta.get("content"):
                if turn.reasoning and not turn.content:
                    self._console.print("\n")
                self._show(turn, turn.content, text, at_s)

    def _show(self, turn: Turn, pieces: list[str], text: str, at_s: float) -> None:
        if turn.first_at_s is None:
            turn.first_at_s = at_s
        pieces.append(text)
        style = "italic dim" if pieces is turn.reasoning else None
        self._console.print(text, end="", style=style, markup=False)


def typed(text: str) -> str:
    """What was typed, with U+FFFD for bytes that are no UTF-8: Python reads them as lone surrogates."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """JSON objects of a stream of server-sent events, up to ``[DONE]``; comments are skipped."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)


def receipt_line(turn: Turn) -> str:
    """One line about what the answer took; only what the server told or the clock measured."""
    parts = []
    if turn.usage:
        cached = (turn.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        parts.append(f"prompt {turn.usage['prompt_tokens']} tokens ({cached} cached)")
        parts.append(f"answer {turn.usage['completion_tokens']} tokens")
    if turn.first_at_s is not None:
        parts.append(f"first after {turn.first_at_s * 1e3:.0f} ms")
        streamed_s = turn.end_at_s - turn.first_at_s
        if turn.usage and streamed_s > 0 and turn.usage["completion_tokens"] > 1:
            parts.append(f"{(turn.usage['completion_tokens'] - 1) / streamed_s:.1f} tokens/s")
    parts += [f"{name} {value}" for name, value in flatten(turn.receipt or {})]
    if turn.finish_reason not in (None, "stop", "tool_calls"):
        parts.append(f"ended by {turn.finish_reason}")
    return " | ".join(parts)


def flatten(receipt: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of the server's receipt with dotted names, in its order."""
    for name, value in receipt.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _checked(answer: httpx.Response) -> httpx.Response:
    if answer.is_success:
        return answer
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:200]
    raise CommandError(f"the server answered {answer.status_code}: {message}")


def _unreachable(url: str, error: httpx.HTTPError) -> CommandError:
    reason = str(error) or type(error).__name__
    return CommandError(f"no answer from {url} ({reason}); start a server with: epdserve up")
