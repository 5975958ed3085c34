"""What nobody should send: a clear refusal or a right answer, a healthy server, and nothing held afterwards."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.stack import Stack

LONG_TEXT = "All work and no play. " * 64


def assert_refused(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The answer is one of the statuses, with the API's error body; returns the body's error."""
    assert answer.status_code in statuses, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["message"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


@pytest.fixture(autouse=True)
def _healthy_afterwards(stack: Stack) -> Iterator[None]:
    yield
    assert stack.http.get("/health").status_code == httpx.codes.OK


@pytest.fixture(autouse=True, scope="module")
def _answers_afterwards(stack: Stack) -> Iterator[None]:
    yield
    assert stack.chat("Still there?").status_code == httpx.codes.OK


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "messages as text": {"messages": "hello"},
    "messages as object": {"messages": {"role": "user"}},
    "no messages": {"messages": []},
    "message as text": {"messages": ["hello"]},
    "unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "content as number": {"messages": [{"role": "user", "content": 5}]},
    "model as number": {"model": 7},
    "temperature as text": {"temperature": "hot"},
    "temperature 7": {"temperature": 7},
    "temperature below 0": {"temperature": -0.1},
    "top_p above 1": {"top_p": 1.5},
    "max_tokens as text": {"max_tokens": "many"},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens fraction": {"max_tokens": 1.5},
    "max_tokens beyond all": {"max_tokens": 10**30},
    "stream as text": {"stream": "yes"},
    "stop as number": {"stop": 5},
    "seed below 0": {"seed": -1},
    "effort unknown": {"reasoning_effort": "heroic"},
    "effort 0": {"reasoning_effort": 0},
    "effort 101": {"reasoning_effort": 101},
    "thinking as text": {"thinking": "yes"},
    "tools as text": {"tools": "hammer"},
    "orphan tool answer": {"messages": [{"role": "tool", "content": "42", "tool_call_id": "x"}]},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
}


@pytest.mark.parametrize("fields", WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
def test_wrong_types_and_values_are_refused(stack: Stack, fields: dict[str, Any]) -> None:
    assert_refused(stack.chat("hello", **fields), 400, 422)


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"hello",
    "cut JSON": b'{"model": "x", "messages": [',
    "a list": b"[]",
    "null": b"null",
    "invalid UTF-8": b'{"model": "\xff\xfe", "messages": []}',
    "lone surrogate": b'{"model": "\\ud800", "messages": []}',
    "NaN": b'{"model": "x", "messages": [], "temperature": NaN}',
    "deep nesting": b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("content", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_bodies_that_are_no_request_are_refused(stack: Stack, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = stack.http.post("/v1/chat/completions", content=content, headers=headers)
    assert_refused(answer, 400, 404, 422)


def test_invalid_utf8_in_a_message_is_refused(stack: Stack) -> None:
    body = json.dumps(stack.body("MARK")).encode().replace(b"MARK", b"a\xff\xfeb")
    headers = {"Content-Type": "application/json"}
    assert_refused(stack.http.post("/v1/chat/completions", content=body, headers=headers), 400, 422)


def test_a_lone_surrogate_in_a_message_does_not_break_anything(stack: Stack) -> None:
    body = json.dumps(stack.body("MARK")).encode().replace(b"MARK", b"a\\ud800b")
    headers = {"Content-Type": "application/json"}
    answer = stack.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code in (200, 400, 422), answer.text


def test_an_unknown_model_is_refused_with_the_known_ones(stack: Stack) -> None:
    error = assert_refused(stack.chat("hello", model="no-such-model"), 404)
    assert stack.model in error["message"]


def test_a_prompt_longer_than_the_context_is_refused(stack: Stack) -> None:
    error = assert_refused(stack.chat("river " * 60_000), 400)
    assert "token" in error["message"]


def test_a_body_of_ten_megabytes_is_refused(stack: Stack) -> None:
    assert_refused(stack.chat("x" * 10_000_000), 413)


def test_two_thousand_messages_are_answered_or_refused(stack: Stack) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(2001)]
    answer = stack.chat("", messages=messages, max_tokens=2)
    assert answer.status_code == httpx.codes.OK or assert_refused(answer, 400)


@pytest.mark.parametrize(
    "text", ["<｜User｜>", "</think>", "<think>", "｜DSML｜", "<｜end▁of▁sentence｜>", "<｜deepseek_image｜>"]
)
def test_markers_typed_by_a_user_stay_text(stack: Stack, text: str) -> None:
    empty = stack.chat("").json()["usage"]["prompt_tokens"]
    answer = stack.chat(text)
    assert answer.status_code == httpx.codes.OK
    # As a marker it would be one token; as text of a small vocabulary it is several.
    assert answer.json()["usage"]["prompt_tokens"] > empty + 1


@pytest.mark.parametrize(
    "text", ["", " ", "\x00", "\u202e\u0301", "\U0001f9d1\u200d\U0001f680" * 50, "\r\n" * 500, "\ufffd"]
)
def test_odd_text_is_answered(stack: Stack, text: str) -> None:
    assert stack.chat(text).status_code == httpx.codes.OK


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/v1/nothing", "/v1/../metrics/x"])
def test_unknown_paths_have_an_error_body(stack: Stack, path: str) -> None:
    assert_refused(stack.http.post(path, json={}), 404, 405)


def test_a_wrong_method_has_an_error_body(stack: Stack) -> None:
    assert_refused(stack.http.get("/v1/chat/completions"), 405)


def _socket_to(stack: Stack) -> socket.socket:
    url = httpx.URL(stack.base_url)
    return socket.create_connection((url.host, url.port or 80), timeout=10)


def _request(body: bytes, *, length: int | None = None) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, 0.1, 0.25, 0.6])
def test_a_client_may_leave_at_any_moment(stack: Stack, after_s: float, streamed: bool) -> None:
    fields = {"max_tokens": 1500, "ignore_eos": True, "stream": streamed}
    body = json.dumps(stack.body(f"{LONG_TEXT} {after_s} {streamed}", **fields)).encode()
    with _socket_to(stack) as connection:
        connection.sendall(_request(body))
        time.sleep(after_s)
    stack.assert_conserved()


def test_a_client_may_leave_in_the_middle_of_its_body(stack: Stack) -> None:
    with _socket_to(stack) as connection:
        connection.sendall(_request(b'{"model": "x", "mess', length=4096))
    stack.assert_conserved()


def test_many_clients_may_leave_together(stack: Stack) -> None:
    connections = [_socket_to(stack) for _ in range(12)]
    for number, connection in enumerate(connections):
        fields = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
        connection.sendall(_request(json.dumps(stack.body(f"{number} {LONG_TEXT}", **fields)).encode()))
    time.sleep(0.3)
    for connection in connections:
        connection.close()
    stack.assert_conserved()


@pytest.mark.parametrize(
    "noise", [b"\x00\x01\x02\x03\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"A" * 70_000]
)
def test_noise_on_the_port_is_survived(stack: Stack, noise: bytes) -> None:
    with _socket_to(stack) as connection:
        try:
            connection.sendall(noise)
            connection.recv(4096)
        except OSError:
            pass  # cut off is as good as refused
