import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from epdserve.services.cli import chat
from epdserve.services.cli.chat import ChatOptions, Turn
from epdserve.services.cli.errors import CommandError


def options(url: str, **changed: Any) -> ChatOptions:
    fields: dict[str, Any] = dict.fromkeys(
        ("model", "api_key", "effort", "temperature", "max_tokens", "system"), None
    )
    return ChatOptions(**{**fields, "url": url, "thinking": True, **changed})


@contextmanager
def server(events: list[Any], *, status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every chat with ``events``; yields its address and the bodies it got."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps({"data": [{"id": "demo"}]}).encode())

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.reply(status, "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())

        def reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}", asked
        http.shutdown()
        thread.join()


def delta(finish_reason: str | None = None, **fields: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


ANSWER = [
    delta(role="assistant"),
    delta(reasoning_content="let me see"),
    delta(content="[bold]4[/]"),
    delta("stop"),
    {
        "choices": [],
        "usage": {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}},
        "epdserve": {"replayed_rows": 3, "ms": {"prefill": 1.5}},
    },
]


def test_an_answer_is_shown_as_it_is_with_its_receipt(capsys: pytest.CaptureFixture[str]) -> None:
    with server(ANSWER) as (url, asked):
        chat.run(options(url, effort="low", system="be brief"), "2+2?")
    out = capsys.readouterr().out
    assert out.index("let me see") < out.index("[bold]4[/]") < out.index("prompt 12 tokens (8 cached)")
    assert "replayed_rows 3 | ms.prefill 1.5" in out
    assert asked[0]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+2?"},
    ]
    assert (asked[0]["reasoning_effort"], asked[0]["stream"], asked[0]["receipt"]) == ("low", True, True)


def test_without_thinking_the_request_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with server(ANSWER) as (url, asked):
        chat.run(options(url, thinking=False), "hello")
    assert asked[0]["thinking"] == {"type": "disabled"}
    assert capsys.readouterr().out


def test_the_message_may_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"from \xff a pipe")))
    with server(ANSWER) as (url, asked):
        chat.run(options(url), None)
    assert asked[0]["messages"][0]["content"] == "from \ufffd a pipe"
    assert capsys.readouterr().out


def test_bytes_that_are_no_utf8_do_not_end_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["a\udcffb", "c", "/quit"])  # as Python reads the byte 0xff
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("rich.console.Console.input", lambda *_: next(lines))
    with server(ANSWER) as (url, asked):
        chat.run(options(url, system="\udcfe"), None)
    texts = [message["content"] for message in asked[-1]["messages"] if message["role"] != "assistant"]
    assert texts == ["\ufffd", "a\ufffdb", "c"]


def test_a_refusal_shows_the_server_s_own_words() -> None:
    with (
        server([], status=400) as (url, _),
        pytest.raises(CommandError, match="the server answered 400"),
    ):
        chat.run(options(url), "hello")


def test_an_error_in_the_stream_ends_the_turn() -> None:
    with (
        server([delta(content="a"), {"error": {"message": "worker lost"}}]) as (url, _),
        pytest.raises(CommandError, match="worker lost"),
    ):
        chat.run(options(url), "hello")


def test_no_server_is_one_clear_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(CommandError, match="start a server with: epdserve up"):
            chat.run(options(url), "hello")


@pytest.mark.parametrize(("text", "effort"), [("low", "low"), ("max", "max"), ("1", 1), ("100", 100)])
def test_effort_is_a_name_or_a_number(text: str, effort: str | int) -> None:
    assert chat.parse_effort(text) == effort


@pytest.mark.parametrize("text", ["", "0", "101", "huge", "-5"])
def test_other_efforts_are_refused(text: str) -> None:
    with pytest.raises(CommandError, match="effort"):
        chat.parse_effort(text)


def test_history_keeps_reasoning_only_if_there_was_any() -> None:
    assert Turn(content=["a", "b"]).message() == {"role": "assistant", "content": "ab"}
    assert Turn(reasoning=["r"], content=["a"]).message()["reasoning_content"] == "r"


def test_a_receipt_says_when_an_answer_was_cut() -> None:
    assert "ended by length" in chat.receipt_line(Turn(finish_reason="length"))
    assert chat.receipt_line(Turn(finish_reason="stop")) == ""


CALL = [
    delta(reasoning_content="I call get."),
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "get"}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Rome"}'}}]}}]},
    delta("tool_calls"),
]


def test_calls_are_shown_and_their_results_are_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = iter(["sunny"])
    monkeypatch.setattr("rich.console.Console.input", lambda *_: next(typed, None) or raise_end())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with server(CALL) as (url, asked):
        chat.run(options(url, tools=[{"type": "function", "function": {"name": "get"}}]), "Weather?")
    assert capsys.readouterr().out.count('calls get(city="Rome")') == 2
    assert asked[0]["tools"] == [{"type": "function", "function": {"name": "get"}}]
    assert [message["role"] for message in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[1]["messages"][2] == {"role": "tool", "tool_call_id": "a", "content": "sunny"}


def raise_end() -> str:
    raise EOFError
