"""A server of OpenAI's shape that is not ours: answers of as many words as asked for, tokens counted in a known way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TEMPLATE = 5  # tokens around each message
LONG_WORD = 6  # from this many letters on a word costs two tokens


def tokens_of(messages: list[dict[str, Any]]) -> int:
    """Tokens of a rendered conversation."""
    return sum(TEMPLATE + sum(1 + (len(word) >= LONG_WORD) for word in _text(m).split()) for m in messages)


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


class ToyServer(ThreadingHTTPServer):
    """Bodies it has got, and what it does with them."""

    daemon_threads = True

    def __init__(self, *, tokenize: bool = True, gap_s: float = 0.0, strict: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokenize, self.gap_s, self.strict = tokenize, gap_s, strict
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error here."""


class _Handler(BaseHTTPRequestHandler):
    server: ToyServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "toy"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            if self.server.tokenize:
                self._whole(200, {"count": tokens_of(body["messages"])})
            else:
                self._whole(404, {"error": {"message": "no such path"}})
            return
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("authorization", ""))
        known = {"model", "messages", "max_tokens", "temperature", "stream", "stream_options", "tools"}
        if body["model"] != "toy" or not isinstance(body["messages"], list) or body["max_tokens"] < 0:
            self._whole(400, {"error": {"message": "no"}})
        elif self.server.strict and set(body) - known:
            self._whole(400, {"error": {"message": f"unknown {sorted(set(body) - known)}"}})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        count = body["max_tokens"]
        for number in range(count):
            last = number == count - 1
            choice = {"index": 0, "delta": {"content": "yes "}, "finish_reason": "length" if last else None}
            self._event({"choices": [choice]})
            time.sleep(self.server.gap_s)
        usage = {"prompt_tokens": tokens_of(body["messages"]), "completion_tokens": count}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _whole(self, status: int, answer: dict[str, Any]) -> None:
        told = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)


@contextmanager
def toy_server(*, tokenize: bool = True, gap_s: float = 0.0, strict: bool = False) -> Iterator[ToyServer]:
    """One on a free port until the block ends."""
    with ToyServer(tokenize=tokenize, gap_s=gap_s, strict=strict) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
