"""Spans of one process: off by default, one trace id through parents, two ways out."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from epdserve.services.errors import InvalidRequest
from epdserve.services.observability.tracing import VARIABLE, Tracing, tracing_from_environment

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def spans(lines: list[str]) -> list[dict[str, Any]]:
    batches = [json.loads(line) for line in lines]
    return [span for b in batches for r in b["resourceSpans"] for s in r["scopeSpans"] for span in s["spans"]]


def tell(tracing: Tracing) -> None:
    """A call with a stage and a job of another process under it."""
    call = tracing.begin("call", parent=PARENT, at=10.0)
    assert call is not None
    tracing.record(
        "job", parent=call.traceparent, began=10.1, ended=10.4, attributes={"n": 3, "x": 0.5, "b": True}
    )
    call.end(at=10.5, attributes={"who": "me"}, error="overloaded")
    tracing.close()


def check(told: list[dict[str, Any]]) -> None:
    by_name = {span["name"]: span for span in told}
    assert {span["traceId"] for span in told} == {PARENT.split("-")[1]}
    assert by_name["call"]["parentSpanId"] == PARENT.split("-")[2]
    assert by_name["job"]["parentSpanId"] == by_name["call"]["spanId"]
    lasted = int(by_name["job"]["endTimeUnixNano"]) - int(by_name["job"]["startTimeUnixNano"])
    assert lasted == pytest.approx(0.3e9, rel=1e-3)
    assert by_name["call"]["status"] == {"code": 2, "message": "overloaded"}
    values = {one["key"]: one["value"] for one in by_name["job"]["attributes"]}
    assert values == {"n": {"intValue": "3"}, "x": {"doubleValue": 0.5}, "b": {"boolValue": True}}


def test_nothing_is_recorded_unless_asked_for() -> None:
    tracing = tracing_from_environment("s", "i", {})
    assert not tracing.on
    assert tracing.begin("call", parent=PARENT, at=0.0) is None
    tracing.record("job", parent=PARENT, began=0, ended=1, attributes={})
    tracing.close()


def test_a_file_holds_a_trace(tmp_path: Path) -> None:
    tell(tracing_from_environment("epdserve-router", "router-0", {VARIABLE: f"file:{tmp_path}"}))
    [file] = tmp_path.glob("traces-router-0-*.jsonl")
    lines = file.read_text().splitlines()
    check(spans(lines))
    resource = json.loads(lines[0])["resourceSpans"][0]["resource"]["attributes"]
    assert {"key": "service.name", "value": {"stringValue": "epdserve-router"}} in resource


@pytest.fixture
def collector() -> Iterator[tuple[str, list[str]]]:
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            got.append(self.rfile.read(int(self.headers["content-length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", got
        server.shutdown()
        thread.join()


def test_a_collector_gets_a_trace(collector: tuple[str, list[str]]) -> None:
    address, got = collector
    tell(tracing_from_environment("s", "i", {VARIABLE: address}))
    check(spans(got))


def test_a_collector_that_is_away_disturbs_nobody() -> None:
    tell(tracing_from_environment("s", "i", {VARIABLE: "http://127.0.0.1:9"}))


def test_another_place_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=VARIABLE):
        tracing_from_environment("s", "i", {VARIABLE: "collector:4318"})
